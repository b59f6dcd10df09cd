"""Parameter shapes of real models."""

from __future__ import annotations


def bert_large(
    hidden: int = 1024, feed_forward: int = 4096, layers: int = 24, vocabulary: int = 30522
) -> list[tuple[int, ...]]:
    """BERT-large with its pre-training heads: 336 million elements in 398 tensors (Devlin et al. 2019)."""
    h, f = hidden, feed_forward
    shapes: list[tuple[int, ...]] = [(vocabulary, h), (512, h), (2, h), (h,), (h,)]
    for _ in range(layers):
        shapes += [(h, h), (h,)] * 4 + [(h,), (h,), (f, h), (f,), (h, f), (h,), (h,), (h,)]
    return [*shapes, (h, h), (h,), (h, h), (h,), (h,), (h,), (vocabulary,), (2, h), (2,)]
