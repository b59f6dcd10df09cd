"""Numeric check of ``cpu_adam``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ops.adam import DeepSpeedCPUAdam
from deepspeed_ops.numeric import Case, formulas


def cases() -> Iterator[Case]:
    """AdamW on the CPU."""
    return formulas.optimizer_cases(DeepSpeedCPUAdam, formulas.adamw, torch.device("cpu"), eps=formulas.EPS)
