"""Numeric check of ``cpu_lion``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ops.lion import DeepSpeedCPULion
from deepspeed_ops.numeric import Case, formulas


def cases() -> Iterator[Case]:
    """Lion on the CPU."""
    return formulas.optimizer_cases(DeepSpeedCPULion, formulas.lion, torch.device("cpu"))
