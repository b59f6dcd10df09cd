"""Numeric check of ``fused_lamb``."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_ops.lamb import FusedLamb
from deepspeed_ops.numeric import Case, formulas, gpu


def cases() -> Iterator[Case]:
    """LAMB on the first GPU; nothing without one."""
    device = gpu()
    if device is not None:
        yield from formulas.optimizer_cases(FusedLamb, formulas.lamb, device, eps=formulas.EPS)
