"""Calls a multi-tensor op with a fixed chunk size, as code written for DeepSpeed or apex does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class MultiTensorApply:
    """Binds ``chunk_size`` (elements) as the first argument of a multi-tensor op.

    Args:
        chunk_size: elements per chunk. Our kernels choose their own chunking; the value is passed on as it is.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag: Any, tensor_lists: Sequence[Any], *args: Any) -> Any:
        """``op(chunk_size, noop_flag, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag, tensor_lists, *args)
