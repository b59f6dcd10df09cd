"""Numeric check of ``clip_grad_norm``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_ops.clip_grad_norm import clip_grad_norm_
from deepspeed_ops.numeric import Case, compare, formulas, gpu


def cases() -> Iterator[Case]:
    """Norm and scaled gradients on the first GPU; nothing without one."""
    device = gpu()
    if device is None:
        return
    given = [formulas.values(n, i) for i, n in enumerate(formulas.SIZES)]
    params = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in formulas.SIZES]
    for p, g in zip(params, given, strict=True):
        p.grad = g.to(device)
    exact = [g.to(torch.float64) for g in given]
    norm = torch.stack([g.square().sum() for g in exact]).sum().sqrt()
    yield compare("norm of the gradients", clip_grad_norm_(params, 1.0), norm)
    for p, g in zip(params, exact, strict=True):
        assert p.grad is not None
        yield compare(f"{p.numel()} scaled gradients", p.grad, g / (norm + 1e-6))
