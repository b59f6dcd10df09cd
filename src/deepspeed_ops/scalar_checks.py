"""Checks of the scalars that users hand to an optimizer: numbers, inside their range."""

from __future__ import annotations

import math
from typing import Any

import torch

from deepspeed_ops.op_builder.errors import DtypeError, UsageError


def number(op: str, name: str, value: Any) -> float:
    """A number, or a tensor of one element, as a float.

    Raises:
        DtypeError: it is something else.
        UsageError: a tensor of another size.
    """
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


def two_betas(op: str, betas: Any) -> tuple[float, float]:
    """Two numbers in [0, 1).

    Raises:
        DtypeError, UsageError: something else.
    """
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise UsageError(f"{op}: betas is {betas!r}", "expected two numbers", "betas=(0.9, 0.999)") from None
    found = number(op, "beta1", beta1), number(op, "beta2", beta2)
    for name, beta in zip(("beta1", "beta2"), found, strict=True):
        if not 0.0 <= beta < 1.0:
            raise UsageError(f"{op}: {name} is {beta}", "expected 0 <= beta < 1", "betas=(0.9, 0.999)")
    return found


_USUAL = {
    "lr": "lr=1e-3",
    "eps": "eps=1e-8",
    "weight_decay": "weight_decay=0.01",
    "max_grad_norm": "max_grad_norm=1.0",
    "max_norm": "max_norm=1.0",
    "max_coeff": "max_coeff=10.0",
    "min_coeff": "min_coeff=0.01",
    "scale": "scale=1.0",
}


def not_negative(op: str, name: str, value: Any) -> float:
    """A finite number >= 0.

    Raises:
        DtypeError, UsageError: something else.
    """
    found = number(op, name, value)
    if not found >= 0.0 or math.isinf(found):
        raise UsageError(f"{op}: {name} is {found}", "expected a finite number >= 0", _USUAL[name])
    return found
