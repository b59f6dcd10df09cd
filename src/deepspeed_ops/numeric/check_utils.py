"""Numeric check of ``utils``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ops.flatten import flatten, unflatten
from deepspeed_ops.numeric import Case, compare, formulas


def cases() -> Iterator[Case]:
    """Flattened and back, bit for bit."""
    tensors = [formulas.values(n, i) for i, n in enumerate(formulas.SIZES)]
    flat = flatten(tensors)
    yield compare("flatten", flat, torch.cat(tensors).to(torch.float64), 0.0)
    for got, want in zip(unflatten(flat, tensors), tensors, strict=True):
        yield compare(f"unflatten, {want.numel()} float32", got, want.to(torch.float64), 0.0)
