"""The optimizers beside Adam's, for tests that ask the same of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed_ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_ops.lamb import FusedLamb
from deepspeed_ops.lion import DeepSpeedCPULion, FusedLion

Make = Callable[..., Any]
NEW: dict[str, Any] = {c.__name__: c for c in (FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb)}
ALL: dict[str, Any] = {c.__name__: c for c in (FusedAdam, DeepSpeedCPUAdam)} | NEW
ON_GPU = ("FusedAdam", "FusedLion", "FusedLamb")
SHAPES = [(3, 4), (17,), (1,), (2, 3, 4, 5), (1025,)]


def parameters(
    rng: torch.Generator, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Parameter]:
    return [Parameter(torch.randn(s, generator=rng).to(device, dtype)) for s in SHAPES]


def twins(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


def give(params: list[Parameter], rng: torch.Generator) -> None:
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).to(p.device, p.dtype)
