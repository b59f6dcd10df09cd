"""The scalars of an Adam step, checked once when they change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_ops.scalar_checks import not_negative, two_betas


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
    beta1, beta2 = two_betas(op, betas)
    numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    found = {name: not_negative(op, name, value) for name, value in numbers.items()}
    return AdamScalars(beta1=beta1, beta2=beta2, **found, adamw=bool(adamw), bias_correction=bool(bias_correction))
