"""``clip_grad_norm``: the global L2 norm of many tensors, and their scaling, without waiting for the GPU."""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import launch
from deepspeed_ops.device_table import SEGMENT, DeviceTable
from deepspeed_ops.launch import BLOCK, Launch, table_type
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.registry import is_eager, register, updated_in_place
from deepspeed_ops.scalar_checks import not_negative
from deepspeed_ops.tensor_checks import FORMATS, is_plain

OP = "clip_grad_norm"
_REDUCE_BLOCK = 256  # threads; kReduceBlock of csrc/common/reduce.cuh


def module() -> ModuleType:
    """What ``ClipGradNormBuilder().load()`` returns: this module, ready to launch.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    launch.launcher(OP)
    return sys.modules[__name__]


class _Plan:
    """Tables for tensors of one GPU and of certain sizes and dtypes; their addresses are read anew at each use.

    Args:
        tensors: at least one with an element.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self._launcher = launch.launcher(OP)
        self._ordinal = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self._launcher.prepare_device(self._ordinal)
        self._tables: list[tuple[str, list[int], Any, DeviceTable]] = []
        collect = self._launcher.collect_addresses
        for dtype in sorted({x.dtype for x in tensors}, key=str):
            part = [i for i, x in enumerate(tensors) if x.dtype is dtype]
            kind = launch.kind_of([FORMATS[dtype]])
            same = [tensors[i] for i in part]
            table = DeviceTable(OP, collect, [same], launch.chunk_elements(kind), ("gradients",))
            columns = table_type(1)(chunks=table.chunks.data_ptr())
            columns.format[0] = table.formats[0]
            self._tables.append((kind, part, columns, table))
        self._blocks = sum(table.blocks for *_, table in self._tables)
        starts = torch.arange(-(-self._blocks // SEGMENT)) * SEGMENT
        pairs = torch.stack((starts, (self._blocks - starts).clamp(max=SEGMENT)), dim=1).to(torch.int32)
        self._segments = pairs.pin_memory().to(self.device, non_blocking=True)

    def _run(self, kernel: str, block: int, grid: int, *parameters: Any) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._ordinal)
        Launch(self._launcher, self._ordinal, kernel, block, *parameters)(stream, grid)

    def norm(self, tensors: Sequence[Tensor], max_norm: float) -> Tensor:
        """Start the computation of the norm and of the factor: float64 ``[2]`` on the device."""
        segments, blocks = self._segments.shape[0], self._blocks
        partials = torch.empty(blocks + segments, dtype=torch.float64, device=self.device)
        result = torch.empty(2, dtype=torch.float64, device=self.device)
        at = partials.data_ptr()
        for kind, part, columns, table in self._tables:
            moved = table.refresh([[tensors[i] for i in part]])
            columns.point(table.rows_for(moved), table.n)
            self._run(f"squares_{kind}", BLOCK, table.blocks, columns, ctypes.c_int64(at))
            at += 8 * table.blocks
        first, sums = ctypes.c_int64(partials.data_ptr()), ctypes.c_int64(at)
        count, limit = ctypes.c_int64(segments), ctypes.c_double(max_norm)
        self._run("reduce_squares", _REDUCE_BLOCK, segments, first, ctypes.c_int64(self._segments.data_ptr()), sums)
        self._run("norm_and_factor", _REDUCE_BLOCK, 1, sums, count, limit, ctypes.c_int64(result.data_ptr()))
        return result

    def scale(self, result: Tensor) -> None:
        """Multiply the tensors of the last :meth:`norm` by the factor."""
        factor = ctypes.c_int64(result.data_ptr() + 8)
        for kind, _, columns, table in self._tables:
            self._run(f"scale_{kind}", BLOCK, table.blocks, columns, factor)


_KEPT = 8  # plans
_plans: OrderedDict[tuple[object, ...], _Plan] = OrderedDict()


def _plan(tensors: Sequence[Tensor]) -> _Plan:
    key = (tensors[0].device, *((x.dtype, x.numel()) for x in tensors))
    plan = _plans.pop(key, None) or _Plan(tensors)
    _plans[key] = plan
    while len(_plans) > _KEPT:
        _plans.popitem(last=False)
    return plan


def _usable(tensors: Sequence[Tensor]) -> list[Tensor]:
    for i, x in enumerate(tensors):
        if x.layout is not torch.strided:
            raise TensorError(f"{OP}: gradient {i} has layout {x.layout}", "expected a dense tensor", "x.to_dense()")
        if x.dtype not in FORMATS:
            expected = "expected float32, float16, bfloat16 or float64"
            raise DtypeError(f"{OP}: gradient {i} is {x.dtype}", expected, "")
        if x.device != tensors[0].device:
            raise TensorError(f"{OP}: gradient {i} is on {x.device}", f"the first is on {tensors[0].device}", "")
    return list(tensors)


def _dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if all(x.dtype is torch.float64 for x in tensors) else torch.float32


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all elements of several tensors, without waiting for the GPU.

    Args:
        tensors: float32, float16, bfloat16 or float64, on one device, dense.

    Returns:
        A tensor of no dimension on their device: float32, or float64 where all of them are.

    Raises:
        TensorError, DtypeError: tensors that the kernel cannot read.
    """
    tensors = _usable(tensors)
    if not tensors or not sum(x.numel() for x in tensors):
        return torch.zeros((), device=tensors[0].device if tensors else None)
    if tensors[0].device.type != "cuda":
        return _norm_in_torch(tensors)
    dense = [x.contiguous() for x in tensors]
    return _plan(dense).norm(dense, 1.0)[0].to(_dtype_of(tensors))


def _norm_in_torch(tensors: Sequence[Tensor]) -> Tensor:
    squares = [torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in tensors]
    return torch.stack(squares).sum().sqrt().to(_dtype_of(tensors))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of parameters so that their global L2 norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``; nothing waits for the GPU, and gradients that are small enough are not
    written. A norm that is infinite makes gradients 0 (and NaN where they were infinite), one that is NaN makes all of
    them NaN.

    Args:
        parameters: whose ``.grad`` is scaled, in place; those without are passed over.
        max_norm: upper limit.
        norm_type: 2.
        error_if_nonfinite: raise where the norm is infinite or NaN; this waits for the GPU.

    Returns:
        The norm before scaling: a tensor of no dimension on the gradients' device.

    Raises:
        UsageError: another norm, or a limit below 0.
        TensorError, DtypeError: gradients that the kernel cannot scale in place.

    Source: Pascanu et al. 2013, algorithm 1.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([w], 1.0), w.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if float(norm_type) != 2.0:
        raise UsageError(
            f"{OP}: norm_type is {norm_type}", "the kernel knows the L2 norm", "torch.nn.utils.clip_grad_norm_"
        )
    limit = not_negative(OP, "max_norm", max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    if is_eager() and all(map(is_plain, gradients)) and not error_if_nonfinite:
        return _clip(gradients, limit)
    if error_if_nonfinite:
        norm = global_norm(gradients)
        if not bool(torch.isfinite(norm)):
            raise UsageError(f"{OP}: the norm of the gradients is {float(norm)}", "error_if_nonfinite=True", "")
    return torch.ops.deepspeed.clip_grad_norm_(gradients, limit)  # type: ignore[no-any-return]


def _clip(g: list[Tensor], max_norm: float) -> Tensor:
    _usable(g)
    if not sum(x.numel() for x in g):
        return torch.zeros((), dtype=_dtype_of(g), device=g[0].device)
    if g[0].device.type != "cuda":
        norm = _norm_in_torch(g)
        factor = (max_norm / (norm.to(torch.float64) + 1e-6)).clamp(max=1.0)
        for x in g:
            x.mul_(factor)
        return norm
    plan = _plan(g)
    result = plan.norm(g, max_norm)
    plan.scale(result)
    updated_in_place(g)
    return result[0].to(_dtype_of(g))


def _fake(g: list[Tensor], max_norm: float) -> Tensor:
    return g[0].new_empty((), dtype=_dtype_of(g))


register(OP, "clip_grad_norm_", {"CPU": _clip, "CUDA": _clip}, _fake)
