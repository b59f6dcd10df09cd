"""DeepSpeedCPULion: 2^27 elements (2^25 with --quick); against the plain formula in torch (which has no Lion),
DeepSpeed's own kernel where ``DS_BENCH_DEEPSPEED`` names a Python that has it, and a STREAM triad as the ceiling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_optimizers import run_op
from benchmarks.fused_adam import parameters
from benchmarks.gpu_optimizers import Foreach
from deepspeed_ops.lion import DeepSpeedCPULion

OP = "cpu_lion"
SCALARS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01}


def verify() -> None:
    """Three steps agree with the plain formula in float64."""
    ours = parameters([(100_003,)], torch.float32, "cpu")
    wide = [torch.nn.Parameter(p.detach().double()) for p in ours]
    wide[0].grad = ours[0].grad.double()
    a, b = DeepSpeedCPULion(ours, **SCALARS), Foreach(wide, "lion", **SCALARS)
    for _ in range(3):
        a.step()
        b.step()
    error = ((ours[0].double() - wide[0]).abs() / (wide[0].abs() + 1e-3)).detach()
    assert float(error.max()) < 24 * torch.finfo(torch.float32).eps, float(error.max())


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases."""
    verify()
    peer = ("torch_foreach", lambda params: Foreach(params, "lion", **SCALARS))
    return run_op(OP, lambda params: DeepSpeedCPULion(params, **SCALARS), peer, "lion", folder, quick)
