"""Small trained optimizers for the tests of state and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam

both = pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])


def give(params: list[Parameter], rng: torch.Generator) -> None:
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).to(p.device, p.dtype)


def trained(cls: Any, rng: torch.Generator, device: Any = "cpu", steps: int = 3, **kw: Any) -> tuple[Any, Any]:
    params = [Parameter(torch.randn(n, generator=rng).to(device)) for n in (5, 33, 1)]
    optimizer = cls(params, lr=0.01, weight_decay=0.1, **kw)
    for _ in range(steps):
        give(params, rng)
        optimizer.step()
    return optimizer, params
