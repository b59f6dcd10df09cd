"""Numeric check of ``fused_adam``."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_ops.adam import FusedAdam
from deepspeed_ops.numeric import Case, formulas, gpu


def cases() -> Iterator[Case]:
    """AdamW on the first GPU; nothing without one."""
    device = gpu()
    if device is not None:
        yield from formulas.optimizer_cases(FusedAdam, formulas.adamw, device, eps=formulas.EPS)
