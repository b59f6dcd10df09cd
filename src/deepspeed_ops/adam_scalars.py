"""The scalars of an Adam step, checked once when they change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ops.op_builder.errors import DtypeError, UsageError


@dataclass(frozen=True)
class AdamScalars:
    """Scalars that all tensors of one call share.

    Attributes:
        lr: learning rate, per step.
        beta1, beta2: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: per step, times ``lr`` with AdamW.
        adamw: decoupled decay (AdamW); else the decay is added to the gradient (L2).
        bias_correction: divide the moments by ``1 - beta**step``.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw: bool
    bias_correction: bool


def checked(op: str, lr: Any, betas: Any, eps: Any, weight_decay: Any, adamw: Any, bias_correction: Any) -> AdamScalars:
    """Check the scalars and make a value of them.

    Args:
        op: name for error texts.
        lr: number, or a tensor of one element on the CPU.
        betas: two numbers in [0, 1).
        eps, weight_decay: numbers, not negative.
        adamw, bias_correction: truth values.

    Raises:
        DtypeError: something is not a number.
        UsageError: a number outside its range.
    """
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise UsageError(f"{op}: betas is {betas!r}", "expected two numbers", "betas=(0.9, 0.999)") from None
    values = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    numbers = {name: _number(op, name, value) for name, value in values.items()}
    for name in ("beta1", "beta2"):
        if not 0.0 <= numbers[name] < 1.0:
            raise UsageError(f"{op}: {name} is {numbers[name]}", "expected 0 <= beta < 1", "betas=(0.9, 0.999)")
    for name, usual in (("lr", "lr=1e-3"), ("eps", "eps=1e-8"), ("weight_decay", "weight_decay=0.01")):
        if not numbers[name] >= 0.0 or math.isinf(numbers[name]):
            raise UsageError(f"{op}: {name} is {numbers[name]}", "expected a finite number >= 0", usual)
    return AdamScalars(**numbers, adamw=bool(adamw), bias_correction=bool(bias_correction))


def _number(op: str, name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(f"{op}: {name} has {value.numel()} elements", "expected one", f"{name}={name}.reshape(())")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            value = value.__float__()
        except AttributeError:
            raise DtypeError(
                f"{op}: {name} is {value!r}", f"expected a number, found {type(value).__name__}", ""
            ) from None
    return float(value)
