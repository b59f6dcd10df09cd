"""Lion, Adagrad, LAMB and Adam's way back in float64, from the formulas, with the error that float32 may make.

Imports nothing of ours. The error analysis is that of reference.py: scales in units of one float32 rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from reference import Hyper, U, _constant, _exact, _Number
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """Float64 results and their scales, in units of one float32 rounding."""

    p: Tensor
    p_scale: Tensor
    m: Tensor
    m_scale: Tensor


def _sign(x: _Number) -> _Number:
    """Where the error reaches zero, the sign is anybody's guess: an error of 2."""
    unsure = (x.value.abs() <= x.error * U) & (x.error > 2 * 2.0**-150 / U)
    return _Number(torch.where(x.value.isnan(), x.value, x.value.sign()), torch.where(unsure, 2.0 / U, 0.0))


def _scaled(g: Tensor, scale: float) -> _Number:
    return _exact(g) if scale == 1.0 else _exact(g) * _constant(1.0 / scale)


def lion(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> Result:
    """Chen et al. 2023, algorithm 2; sign(0) = 0."""
    gradient = _scaled(g, grad_scale)
    c = _constant(beta1) * _exact(m) + _constant(1.0 - beta1) * gradient
    new_m = _constant(beta2) * _exact(m) + _constant(1.0 - beta2) * gradient
    update = _constant(lr) * _sign(c)
    if weight_decay:
        update = update + _constant(lr * weight_decay) * _exact(p)
    new_p = _exact(p) - update
    return Result(new_p.value, new_p.error, new_m.value, new_m.error)


def adagrad(
    p: Tensor, g: Tensor, v: Tensor, lr: float, eps: float = 1e-10, weight_decay: float = 0.0, grad_scale: float = 1.0
) -> Result:
    """Duchi et al. 2011, diagonal case; weight decay is added to the gradient."""
    gradient = _scaled(g, grad_scale)
    if weight_decay:
        gradient = gradient + _constant(weight_decay) * _exact(p)
    new_v = _exact(v) + gradient * gradient
    new_p = _exact(p) - _constant(lr) * (gradient / (new_v.sqrt() + _constant(eps)))
    return Result(new_p.value, new_p.error, new_v.value, new_v.error)


@dataclass(frozen=True)
class LambHyper:
    """The scalars of a LAMB step."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    eps_inside_sqrt: bool = False
    bias_correction: bool = True
    grad_scale: float = 1.0


@dataclass(frozen=True)
class LambResult:
    """Float64 results, scales, and the trust ratio with its relative scale."""

    p: Tensor
    p_scale: Tensor
    m: Tensor
    m_scale: Tensor
    v: Tensor
    v_scale: Tensor
    ratio: float
    ratio_scale: float


def _stored(x: _Number, dtype: torch.dtype) -> _Number:
    """As a narrower format keeps it; where float32 was on the other side of a rounding boundary, one step of it off."""
    if dtype not in (torch.float16, torch.bfloat16):
        return x
    info = torch.finfo(dtype)
    kept = x.value.to(dtype).to(torch.float64)
    return _Number(kept, x.error + (info.eps / 2 * x.value.abs() + info.smallest_normal * info.eps) / U)


def lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, h: LambHyper) -> LambResult:
    """You et al. 2020, algorithm 2, with the bias correction in the step size and a clamped ratio, for one tensor."""
    gradient = _scaled(g, h.grad_scale)
    new_m = _constant(h.beta1) * _exact(m) + _constant(1.0 - h.beta1) * gradient
    new_v = _constant(h.beta2) * _exact(v) + _constant(1.0 - h.beta2) * gradient * gradient
    kept_m, kept_v = _stored(new_m, m.dtype), _stored(new_v, v.dtype)
    eps = _constant(h.eps)
    denominator = (kept_v + eps).sqrt() if h.eps_inside_sqrt else kept_v.sqrt() + eps
    u = kept_m / denominator
    if h.weight_decay:
        u = u + _constant(h.weight_decay) * _exact(p)
    p_norm, u_norm = float(p.double().norm()), float(u.value.norm())
    ratio, ratio_scale = 1.0, 0.0
    if p_norm and u_norm:
        ratio = min(max(p_norm / u_norm, h.min_coeff), h.max_coeff)
        # Two sums of squares in a tree of float32 (20 roundings at most, halved by the root), u's error, a quotient.
        ratio_scale = 24.0 + float((u.value.abs() * u.error).sum()) / u_norm**2
    size = h.lr
    if h.bias_correction:
        size *= math.sqrt(1.0 - h.beta2**step) / (1.0 - h.beta1**step)
    factor = torch.tensor(size * ratio, dtype=torch.float64)
    new_p = _exact(p) - _Number(factor, factor * (2.0 + ratio_scale)) * u
    moments = (new_m.value, new_m.error, new_v.value, new_v.error)
    return LambResult(new_p.value, new_p.error, *moments, ratio, ratio_scale)


def adam_back(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, h: Hyper) -> LambResult:
    """From p, m and v after a step and the step's gradient to those before it."""
    bias1 = 1.0 - h.beta1**step if h.bias_correction else 1.0
    bias2 = 1.0 - h.beta2**step if h.bias_correction else 1.0
    new_m, new_v = _exact(m), _exact(v)
    denominator = new_v.sqrt() * _constant(1.0 / math.sqrt(bias2)) + _constant(h.eps)
    old_p = _exact(p) + _constant(h.lr / bias1) * (new_m / denominator)
    if h.adamw and h.weight_decay:
        old_p = old_p * _constant(1.0 / (1.0 - h.lr * h.weight_decay))
    gradient = _scaled(g, h.grad_scale)
    if not h.adamw and h.weight_decay:
        gradient = gradient + _constant(h.weight_decay) * old_p
    old_m = (new_m - _constant(1.0 - h.beta1) * gradient) * _constant(0.0 if step == 1 else 1.0 / h.beta1)
    old_v = (new_v - _constant(1.0 - h.beta2) * gradient * gradient) * _constant(0.0 if step == 1 else 1.0 / h.beta2)
    values = (old_p.value, old_p.error, old_m.value, old_m.error, old_v.value.clamp(min=0.0), old_v.error)
    return LambResult(*values, 1.0, 0.0)
