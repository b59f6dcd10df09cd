"""What the ops on CPU tensors share under DeepSpeed's names: one tensor at a time, SIMD levels, optimizer ids."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.registry import updated_in_place
from deepspeed_ops.table_step import HostStep, simd_request
from deepspeed_ops.tensor_checks import FORMATS, check_updated, is_plain, laid_out_like

log = logging.getLogger("deepspeed_ops")


def simd_levels(op: str) -> tuple[str, ...]:
    """SIMD levels that the op's library holds and this CPU has, best first."""
    return tuple(str(loader.host_module(op).simd_levels()).split(","))


def simd_level(op: str) -> str:
    """The level that a call uses now: the best one, or what ``DS_SIMD`` names.

    Raises:
        ValueError: ``DS_SIMD`` names a level that this CPU lacks.
    """
    return str(loader.host_module(op).simd_level(simd_request()))


def check_id(op: str, known: Any, optimizer_id: int, step: int) -> None:
    """Refuse an id that was never created, and a step below 1.

    Raises:
        UsageError: that.
    """
    if optimizer_id not in known:
        create = f"create_{op.removeprefix('cpu_')}"
        raise UsageError(
            f"{op}: optimizer id {optimizer_id} is unknown", f"{create} was not called for it", f"{create}(...)"
        )
    if step < 1:
        raise UsageError(f"{op}: step is {step}", "the first step is 1", "step=1")


def update_one(
    kind: type[HostStep],
    step: int,
    fill: Callable[[Any], None],
    p: Tensor,
    g: Tensor,
    moments: dict[str, Tensor],
    copy: Tensor | None = None,
    function: str = "step_table",
) -> None:
    """One step of one tensor, in place.

    Args:
        kind: the op's kind of step.
        step: its number, 1-based.
        fill: puts the scalars into the op's arguments.
        p: parameters. Mutated.
        g: gradient.
        moments: by DeepSpeed's names. Mutated.
        copy: float16 or bfloat16, shape and layout of ``p``. Mutated.
        function: of the library.

    Raises:
        TensorError, DtypeError: a tensor that cannot be updated in place, or dtypes that do not go together.
    """
    op = kind.library
    tensors = [*_checked(op, p, g, moments), *([] if copy is None else [_checked_copy(op, p, copy)])]
    columns = (ctypes.c_int64 * (len(tensors) + 1))(*(x.data_ptr() for x in tensors), p.numel())
    counter = ctypes.c_int64(step)
    formats = (FORMATS[x.dtype] for x in tensors[:3])
    args: Any = kind.Args(ctypes.addressof(columns), ctypes.addressof(counter), 1, *formats)
    args.grad_scale, args.threads = 1.0, torch.get_num_threads()
    fill(args)
    run = getattr(loader.host_module(op), function if copy is None else f"{function}_copy")
    more = () if copy is None else (FORMATS[copy.dtype],)
    run(ctypes.addressof(args), *more, simd_request())
    updated_in_place([x for x in tensors if x is not tensors[1]])


def _checked(op: str, p: Tensor, g: Tensor, moments: dict[str, Tensor]) -> list[Tensor]:
    for name, x in {"params": p, "grads": g, **moments}.items():
        if not is_plain(x) or x.device.type != "cpu":
            raise TensorError(
                f"{op}: {name} is a {type(x).__name__} on {x.device}", "expected a CPU tensor", f"{name}.cpu()"
            )
        if x.dtype not in FORMATS or x.dtype is torch.float64:
            raise DtypeError(f"{op}: {name} is {x.dtype}", "expected float32, float16 or bfloat16", "")
        if name != "grads":
            check_updated(op, name, 0, x)
        if name in moments and (x.shape != p.shape or x.stride() != p.stride()):
            raise TensorError(
                f"{op}: {name} has shape {tuple(x.shape)}", f"params has {tuple(p.shape)}, or other strides", ""
            )
    updated = {"params": p, **moments}
    if len({x.dtype for x in moments.values()}) > 1:
        (first, x), (second, y) = moments.items()
        raise DtypeError(f"{op}: {first} is {x.dtype} and {second} {y.dtype}", "expected one dtype", "")
    runs = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, name) for name, x in updated.items() if x.numel())
    for (_, end, first), (begin, _, second) in pairwise(runs):
        if begin < end:
            raise TensorError(f"{op}: {first} and {second} overlap in memory", "each is updated in place", "")
    return [p, laid_out_like(op, 0, g, p), *moments.values()]


def _checked_copy(op: str, p: Tensor, copy: Tensor) -> Tensor:
    if p.dtype is not torch.float32 or copy.dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(
            f"{op}: params is {p.dtype} and its copy {copy.dtype}", "expected float32 and float16 or bfloat16", ""
        )
    if not is_plain(copy) or copy.device.type != "cpu":
        raise TensorError(
            f"{op}: the copy is on {copy.device}",
            "the CPU writes to its own memory",
            "give a pinned CPU tensor, then gpu.copy_(pinned, non_blocking=True)",
        )
    check_updated(op, "copy", 0, copy)
    if copy.shape != p.shape or copy.stride() != p.stride():
        raise TensorError(f"{op}: the copy has shape {tuple(copy.shape)}", f"params has {tuple(p.shape)}", "")
    return copy
