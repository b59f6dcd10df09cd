"""``utils``: many tensors as one flat tensor and back, a tensor as bytes. Python only: torch does the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import overload

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import DtypeError, TensorError
from deepspeed_ops.registry import is_eager, register

OP = "utils"


def module() -> ModuleType:
    """What ``UtilsBuilder().load()`` returns: this module. There is nothing to compile."""
    return sys.modules[__name__]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of several tensors, one after the other, in one new tensor.

    Args:
        tensors: of one dtype and device, of any shapes and strides; at least one.

    Raises:
        TensorError, DtypeError: no tensor, or tensors of different devices or dtypes.

    Example:
        >>> import torch
        >>> flatten([torch.ones(2, 2), torch.zeros(1)])
        tensor([1., 1., 1., 1., 0.])
    """
    tensors = list(tensors)
    _check(tensors)
    if is_eager():
        return _flatten(tensors)
    return torch.ops.deepspeed.flatten(tensors)  # type: ignore[no-any-return]


def _check(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise TensorError(f"{OP}: flatten of no tensor", "its dtype would be unknown", "")
    first = tensors[0]
    for i, x in enumerate(tensors):
        if x.dtype is not first.dtype:
            raise DtypeError(f"{OP}: tensor {i} is {x.dtype}", f"the first is {first.dtype}", f"x.to({first.dtype})")
        if x.device != first.device:
            raise TensorError(f"{OP}: tensor {i} is on {x.device}", f"the first is on {first.device}", "")


def _flatten(tensors: list[Tensor]) -> Tensor:
    _check(tensors)
    return torch.cat([x.reshape(-1) for x in tensors])


def _fake_flatten(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(sum(x.numel() for x in tensors))


register(OP, "flatten", {"CPU": _flatten, "CUDA": _flatten}, _fake_flatten)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of a flat tensor with the shapes of others, in their order.

    Args:
        flat: one dimension; as many elements as ``tensors`` together.
        tensors: only their shapes are used.

    Raises:
        TensorError: the sizes do not fit.

    Example:
        >>> import torch
        >>> [tuple(x.shape) for x in unflatten(torch.arange(5.0), [torch.ones(2, 2), torch.zeros(1)])]
        [(2, 2), (1,)]
    """
    sizes = [x.numel() for x in tensors]
    if flat.dim() != 1 or flat.numel() != sum(sizes):
        raise TensorError(
            f"{OP}: unflatten of a tensor of shape {tuple(flat.shape)}",
            f"expected one dimension of {sum(sizes)} elements",
            "flat.reshape(-1)",
        )
    return tuple(part.view(x.shape) for part, x in zip(flat.split(sizes), tensors, strict=True)) if sizes else ()


@overload
def cast_to_byte_tensor(src_tensor: Tensor) -> Tensor: ...
@overload
def cast_to_byte_tensor(src_tensor: Sequence[Tensor]) -> list[Tensor]: ...
def cast_to_byte_tensor(src_tensor: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """The memory of a tensor as uint8, shared with it; the view keeps it alive. Of a list: a list of them.

    Args:
        src_tensor: contiguous, of any dtype; or several.

    Returns:
        uint8, one dimension.

    Raises:
        TensorError: not contiguous, or sparse.

    Example:
        >>> import torch
        >>> cast_to_byte_tensor(torch.tensor([1.0]))
        tensor([  0,   0, 128,  63], dtype=torch.uint8)
    """
    if not isinstance(src_tensor, Tensor):
        return [cast_to_byte_tensor(x) for x in src_tensor]
    x = src_tensor
    if x.layout is not torch.strided or not x.is_contiguous():
        found = f"strides {x.stride()}" if x.layout is torch.strided else f"layout {x.layout}"
        raise TensorError(
            f"{OP}: cast_to_byte_tensor of a tensor with {found}",
            "bytes of a copy would not be its own",
            "x.contiguous()",
        )
    return x.detach().reshape(-1).view(torch.uint8)
