"""Test inside the package: every CPU op, through DeepSpeed's names, against the formula in float64."""

from __future__ import annotations

import math
import os

os.environ["DS_JIT"] = "0"  # what was installed, nothing compiled here

import torch
from deepspeed_ops.op_builder.loader import Loader
from deepspeed_ops.op_builder.spec import all_specs

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion

LR, EPS, STEPS = 1e-2, 1e-8, 3


def adam(p: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Kingma & Ba 2015, algorithm 1, with decoupled decay 0."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + EPS)
    return p


def adagrad(p: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Duchi, Hazan & Singer 2011, the diagonal form."""
    s = torch.zeros_like(p)
    for g in gradients:
        s = s + g * g
        p = p - LR * g / (s.sqrt() + EPS)
    return p


def lion(p: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Chen et al. 2023, algorithm 2, without decay."""
    m = torch.zeros_like(p)
    for g in gradients:
        p = p - LR * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    return p


def main() -> None:
    """Run them all, and load every op that has a host library."""
    cases = {
        DeepSpeedCPUAdam: (adam, {"eps": EPS, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        DeepSpeedCPUAdagrad: (adagrad, {"eps": EPS}),
        DeepSpeedCPULion: (lion, {"betas": (0.9, 0.99)}),
    }
    index = torch.arange(1023, dtype=torch.float64)
    start = torch.sin(index)
    gradients = [torch.cos(index * (k + 1)) + 0.1 for k in range(STEPS)]
    for kind, (formula, options) in cases.items():
        p = torch.nn.Parameter(start.float())
        optimizer = kind([p], lr=LR, **options)
        for g in gradients:
            p.grad = g.float()
            optimizer.step()
        expected = formula(start, gradients)
        error = (p.detach().double() - expected).abs().max().item()
        assert error < 1e-6, f"{kind.__name__}: {error}"
        moved = (expected - start).abs().max().item()
        assert moved > 1e-3 and math.isfinite(moved)
        print(f"{kind.__name__}: largest error {error:.1e}")
    loader = Loader()
    for op, spec in all_specs().items():
        if spec.host:
            loader.host_module(op)
    print("every host library loads with DS_JIT=0")


if __name__ == "__main__":
    main()
