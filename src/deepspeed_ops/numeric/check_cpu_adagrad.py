"""Numeric check of ``cpu_adagrad``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_ops.numeric import Case, formulas


def cases() -> Iterator[Case]:
    """Adagrad on the CPU."""
    return formulas.optimizer_cases(DeepSpeedCPUAdagrad, formulas.adagrad, torch.device("cpu"), eps=formulas.EPS)
