"""Adam and AdamW in float64, from the formula. Imports nothing of ours.

Formula: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2.

Beside each result stands a *scale*: the sum of the rounding errors that float32 arithmetic makes on the way to it,
first order, in units of one float32 rounding (u = eps / 2). It is found by a running error analysis: every operation
adds the magnitude of its result (its own rounding) and passes on the errors of its operands. Where a result is the
difference of large numbers its scale is large, as it must be. Constants (beta, lr, ...) count one rounding each; fma
counts as two operations, so the bound holds for levels with and without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

U = 2.0**-24  # one rounding to nearest of float32, relative
TINY = 2.0**-150  # one rounding of a float32 that underflows, absolute


@dataclass(frozen=True)
class Hyper:
    """The scalars of a step."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw: bool = True
    bias_correction: bool = True
    grad_scale: float = 1.0


@dataclass(frozen=True)
class Step:
    """Float64 results and their scales, in units of one float32 rounding."""

    p: Tensor
    m: Tensor
    v: Tensor
    p_scale: Tensor
    m_scale: Tensor
    v_scale: Tensor


class _Number:
    """A float64 value with the error that float32 arithmetic has collected in it, in units of U."""

    def __init__(self, value: Tensor, error: Tensor) -> None:
        self.value, self.error = value, error

    def _rounded(self, value: Tensor, error: Tensor) -> _Number:
        return _Number(value, error + value.abs() + TINY / U)

    def __add__(self, other: _Number) -> _Number:
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: _Number) -> _Number:
        return self._rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: _Number) -> _Number:
        error = self.error * other.value.abs() + other.error * self.value.abs()
        return self._rounded(self.value * other.value, error)

    def __truediv__(self, other: _Number) -> _Number:
        value = self.value / other.value
        error = (self.error + other.error * value.abs()) / other.value.abs()
        return self._rounded(value, error.nan_to_num(nan=0.0))  # x / infinity is exactly 0

    def sqrt(self) -> _Number:
        value = self.value.sqrt()
        # Near zero the slope is infinite; the error of a root is never more than the root of the error.
        slope = torch.where(value > 0, self.error / (2 * value), torch.full_like(value, math.inf))
        return self._rounded(value, torch.minimum(slope, (self.error * U).sqrt() / U))


def _exact(x: Tensor) -> _Number:
    wide = x.detach().to(torch.float64)
    return _Number(wide, torch.zeros_like(wide))


def _constant(x: float) -> _Number:
    value = torch.tensor(x, dtype=torch.float64)
    return _Number(value, value.abs())


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, h: Hyper) -> Step:
    """One step.

    Args:
        p, g, m, v: any shape, any dtype; taken as exact. Not mutated.
        step: 1-based.
        h: scalars.
    """
    bias1 = 1.0 - h.beta1**step if h.bias_correction else 1.0
    bias2 = 1.0 - h.beta2**step if h.bias_correction else 1.0
    old_p, gradient = _exact(p), _exact(g)
    if h.grad_scale != 1.0:
        gradient = gradient * _constant(1.0 / h.grad_scale)
    if not h.adamw and h.weight_decay:
        gradient = gradient + _constant(h.weight_decay) * old_p
    new_m = _constant(h.beta1) * _exact(m) + _constant(1.0 - h.beta1) * gradient
    new_v = _constant(h.beta2) * _exact(v) + _constant(1.0 - h.beta2) * gradient * gradient
    denominator = new_v.sqrt() * _constant(1.0 / math.sqrt(bias2)) + _constant(h.eps)
    update = _constant(h.lr / bias1) * (new_m / denominator)
    if h.adamw and h.weight_decay:
        update = update + _constant(h.lr * h.weight_decay) * old_p
    new_p = old_p - update
    return Step(new_p.value, new_m.value, new_v.value, new_p.error, new_m.error, new_v.error)


def adam_eager(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, h: Hyper) -> tuple[Tensor, Tensor, Tensor]:
    """The same step as plain torch code would do it, every operation in the tensors' own dtypes."""
    bias1 = 1.0 - h.beta1**step if h.bias_correction else 1.0
    bias2 = 1.0 - h.beta2**step if h.bias_correction else 1.0
    g = g.to(p.dtype)
    if not h.adamw:
        g = g + h.weight_decay * p
    m = h.beta1 * m + ((1.0 - h.beta1) * g).to(m.dtype)
    v = h.beta2 * v + ((1.0 - h.beta2) * g * g).to(v.dtype)
    decayed = p * (1.0 - h.lr * h.weight_decay) if h.adamw else p
    update = (h.lr / bias1) * m / (v.sqrt() / math.sqrt(bias2) + h.eps)
    return decayed - update.to(p.dtype), m, v
