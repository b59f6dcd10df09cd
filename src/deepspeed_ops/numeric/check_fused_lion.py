"""Numeric check of ``fused_lion``."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_ops.lion import FusedLion
from deepspeed_ops.numeric import Case, formulas, gpu


def cases() -> Iterator[Case]:
    """Lion on the first GPU; nothing without one."""
    device = gpu()
    if device is not None:
        yield from formulas.optimizer_cases(FusedLion, formulas.lion, device)
