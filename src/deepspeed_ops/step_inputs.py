"""What a step is handed beside parameters and state: a gradient scaler's values, gradients from elsewhere, copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepspeed_ops.op_builder.errors import TensorError


@dataclass(frozen=True)
class Amp:
    """What a gradient scaler hands over: tensors of one float32 element, or None."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class Given:
    """What the caller of a step hands over in place of the parameters' ``.grad``, and what it wants written.

    Attributes:
        gradients: for each group, a gradient or None for each parameter; None: the parameters' own.
        copies: for each group, a half precision tensor or None for each parameter; None: no copies.
        scale: the gradients are divided by it.
        norms: for each group, the norm of its gradients (times ``scale``), where the optimizer clips.
    """

    gradients: Sequence[list[Any]] | None = None
    copies: Sequence[list[Any]] | None = None
    scale: float = 1.0
    norms: Sequence[Any] | None = None


def per_group(op: str, name: str, given: Any, groups: int) -> list[list[Any]] | None:
    """Tensors for each group: from a list of lists, or a flat list or generator for a single group.

    Raises:
        TensorError: for another number of groups.
    """
    if given is None:
        return None
    items = list(given)
    nested = [list(x) for x in items] if items and not isinstance(items[0], Tensor | type(None)) else [items]
    if len(nested) != groups:
        raise TensorError(f"{op}: {name} for {len(nested)} groups", f"there are {groups}", "a list for each group")
    return nested
