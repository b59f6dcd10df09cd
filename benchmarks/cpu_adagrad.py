"""DeepSpeedCPUAdagrad: 2^27 elements (2^25 with --quick); against torch's fused CPU Adagrad, DeepSpeed's own kernel
where ``DS_BENCH_DEEPSPEED`` names a Python that has it, and a STREAM triad of the same run as the ceiling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_optimizers import run_op
from benchmarks.fused_adam import parameters
from deepspeed_ops.adagrad import DeepSpeedCPUAdagrad

OP = "cpu_adagrad"
SCALARS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.01}


def verify() -> None:
    """Three steps agree with torch's Adagrad in float64."""
    ours = parameters([(100_003,)], torch.float32, "cpu")
    wide = [torch.nn.Parameter(p.detach().double()) for p in ours]
    wide[0].grad = ours[0].grad.double()
    a, b = DeepSpeedCPUAdagrad(ours, **SCALARS), torch.optim.Adagrad(wide, **SCALARS)
    for _ in range(3):
        a.step()
        b.step()
    error = ((ours[0].double() - wide[0]).abs() / (wide[0].abs() + 1e-2)).detach()
    assert float(error.max()) < 24 * torch.finfo(torch.float32).eps, float(error.max())


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases."""
    verify()
    peer = ("torch_fused", lambda params: torch.optim.Adagrad(params, fused=True, **SCALARS))
    return run_op(OP, lambda params: DeepSpeedCPUAdagrad(params, **SCALARS), peer, "adagrad", folder, quick)
