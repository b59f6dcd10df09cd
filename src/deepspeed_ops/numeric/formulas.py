"""The optimizers' formulas in float64, on one tensor, with the options that the checks use; and the checks' inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.numeric import Case, compare

STEPS = 3
LR, WEIGHT_DECAY, EPS = 0.01, 0.1, 1e-8
# One vector with a tail, one element, a piece of several chunks.
SIZES = (1027, 1, 70_001)

State = dict[str, Tensor]
Formula = Callable[[Tensor, Tensor, State, int], Tensor]


def adamw(p: Tensor, g: Tensor, state: State, step: int) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2."""
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", torch.zeros_like(p)) + 0.001 * g * g
    update = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + EPS)
    moved: Tensor = p * (1 - LR * WEIGHT_DECAY) - LR * update
    return moved


def lion(p: Tensor, g: Tensor, state: State, step: int) -> Tensor:
    """Chen et al. 2023, algorithm 2."""
    m = state.get("m", torch.zeros_like(p))
    moved: Tensor = p * (1 - LR * WEIGHT_DECAY) - LR * (0.9 * m + 0.1 * g).sign()
    state["m"] = 0.99 * m + 0.01 * g
    return moved


def adagrad(p: Tensor, g: Tensor, state: State, step: int) -> Tensor:
    """Duchi et al. 2011, diagonal case; weight decay is added to the gradient."""
    g = g + WEIGHT_DECAY * p
    v = state["v"] = state.get("v", torch.zeros_like(p)) + g * g
    return p - LR * g / (v.sqrt() + EPS)


def lamb(p: Tensor, g: Tensor, state: State, step: int) -> Tensor:
    """You et al. 2020, algorithm 2, with a clamped trust ratio and the bias correction in the step size."""
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", torch.zeros_like(p)) + 0.001 * g * g
    u = m / (v.sqrt() + EPS) + WEIGHT_DECAY * p
    ratio = (p.norm() / u.norm()).clamp(0.01, 10.0)
    size = LR * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    moved: Tensor = p - size * ratio * u
    return moved


def values(count: int, phase: int) -> Tensor:
    """``count`` float32 values in [-1, 1], none nearer to zero than 0.1: no sign is a matter of rounding."""
    x = torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + 1.3 * phase)
    return (x + 0.1 * x.sign()).clamp(-1.0, 1.0).masked_fill(x == 0, 0.5).to(torch.float32)


def optimizer_cases(
    make: Callable[..., Any], formula: Formula, device: torch.device, **options: float | bool
) -> Iterator[Case]:
    """Some steps of an optimizer class beside its formula.

    Args:
        make: the class.
        formula: new parameter of old one, gradient, state (changed in place) and number of the step from 1.
        device: where its tensors live.
        options: of the class, beside learning rate and weight decay.
    """
    params = [torch.nn.Parameter(values(n, i).to(device)) for i, n in enumerate(SIZES)]
    exact = [p.detach().cpu().to(torch.float64) for p in params]
    states: list[State] = [{} for _ in SIZES]
    optimizer = make(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    for step in range(1, STEPS + 1):
        for i, p in enumerate(params):
            # One sign for all steps: Lion's direction never comes near zero.
            g = values(p.numel(), i + 7) * step
            p.grad = g.to(device)
            exact[i] = formula(exact[i], g.to(torch.float64), states[i], step)
        optimizer.step()
    for p, want in zip(params, exact, strict=True):
        yield compare(f"{make.__name__}, {STEPS} steps of {p.numel()} float32 on {device.type}", p, want)
