"""What a tensor must be like before a kernel may use its memory: plain, dense, laid out as its parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import DtypeError, TensorError

# The codes that the kernels use; ``enum Format`` in csrc.
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
PLAIN = (Tensor, torch.nn.Parameter)


def groups_by_dtype(
    p: Sequence[Tensor],
    g: Sequence[Tensor | None],
    m: Sequence[Tensor | None],
    copies: Sequence[Tensor | None] | None = None,
) -> list[list[int]]:
    """Positions of tensors with a gradient, grouped so that p, g, m and copies have one dtype each and one device."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (pi, gi, mi) in enumerate(zip(p, g, m, strict=True)):
        if gi is not None:
            others = (mi, None if copies is None else copies[i])
            key = (pi.device, pi.dtype, gi.dtype, *(None if x is None else x.dtype for x in others))
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is exactly ``Tensor`` or ``Parameter``: memory that a kernel may use by address."""
    return type(tensor) in PLAIN


def check_updated(op: str, name: str, index: int, tensor: Tensor) -> None:
    """Refuse a tensor that is to be updated in place but does not own one dense run of elements.

    Raises:
        TensorError: strided, overlapping or sparse.
    """
    if tensor.layout is not torch.strided:
        raise TensorError(
            f"{op}: {name}[{index}] has layout {tensor.layout}", "expected a dense tensor", "use .to_dense()"
        )
    if tensor.data_ptr() == 0 and tensor.numel() > 0:
        raise TensorError(
            f"{op}: {name}[{index}] of shape {tuple(tensor.shape)} has no memory",
            "its storage was freed, as sharding engines do between uses",
            "step while it is materialised",
        )
    if tensor.is_contiguous() or _memory_format(tensor) is not None:
        return
    raise TensorError(
        f"{op}: {name}[{index}] of shape {tuple(tensor.shape)} has strides {tensor.stride()}",
        "it is updated in place, so it must be contiguous (or channels_last); a copy would lose the update",
        f"{name}.data = {name}.data.contiguous()",
    )


def _memory_format(tensor: Tensor) -> torch.memory_format | None:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return None


def laid_out_like(op: str, index: int, g: Tensor, p: Tensor) -> Tensor:
    """The gradient in the layout of its parameter: itself where that holds, else a copy.

    Raises:
        TensorError: another shape or device, or sparse.
        DtypeError: not a floating point dtype that the kernels read.
    """
    if g.layout is not torch.strided:
        raise TensorError(
            f"{op}: gradient {index} is sparse",
            "the kernels read dense ones",
            "sparse=False",
        )
    if g.shape != p.shape:
        raise TensorError(
            f"{op}: gradient {index} has shape {tuple(g.shape)}",
            f"its parameter has shape {tuple(p.shape)}",
            "set p.grad anew",
        )
    if g.device != p.device:
        raise TensorError(
            f"{op}: gradient {index} is on {g.device}", f"its parameter is on {p.device}", "g.to(p.device)"
        )
    if g.dtype not in FORMATS or (g.dtype is torch.float64) != (p.dtype is torch.float64):
        raise DtypeError(
            f"{op}: gradient {index} is {g.dtype}", f"its parameter is {p.dtype}", f"p.grad = p.grad.to({p.dtype})"
        )
    in_memory = not g.is_neg() and (g.data_ptr() != 0 or g.numel() == 0)  # else torch computes it when it is read
    if in_memory and (g.stride() == p.stride() or (g.is_contiguous() and p.is_contiguous())):
        return g
    return torch.empty_like(p, dtype=g.dtype).copy_(g)
