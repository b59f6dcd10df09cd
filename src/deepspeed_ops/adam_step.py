"""One Adam step over the tensors of one table: on the CPU, or on one GPU.

A table's tensors share dtypes and device. ``counters`` is int64 ``[n]``: how many steps each tensor has taken; a step
counts up those that have a gradient. On a GPU the counters lie on the host as long as the host alone decides whether a
step counts, and on the device where the device does (a captured graph, ``found_inf``): then nothing waits for the
device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import fused_adam_launch
from deepspeed_ops.adam_scalars import AdamScalars
from deepspeed_ops.device_table import DeviceTable
from deepspeed_ops.fused_adam_launch import StepArgs
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.table_optimizer import Amp
from deepspeed_ops.tensor_checks import FORMATS
from deepspeed_ops.tensor_table import TensorTable

Lists = Sequence[list[Any]]


class CpuStepArgs(ctypes.Structure):
    """``ds::StepArgs`` of csrc/cpu_adam/cpu_adam.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("table", "steps", "n", "p_format", "g_format", "state_format")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")),
        *((name, ctypes.c_int64) for name in ("adamw", "bias_correction", "threads")),
    ]


def simd_request() -> str:
    """The SIMD level that ``DS_SIMD`` asks for; empty for the best one."""
    return os.environ.get("DS_SIMD", "").strip().lower()


class CpuStep:
    """The tensors of one table on the CPU.

    Args:
        op: name for error texts.
        lists: p, g, m, v: ``n`` tensors each, a gradient may be None.
    """

    fixed_storage = False

    def __init__(self, op: str, lists: Lists) -> None:
        dtypes = {x.dtype for x in lists[0]}
        if torch.float64 in dtypes:
            raise DtypeError(
                f"{op}: parameters are float64", "cpu_adam computes in float32", "use torch.optim.AdamW for float64"
            )
        self._module = loader.host_module("cpu_adam")
        self.table = TensorTable(op, self._module.collect_addresses, lists)
        self.table.refuse_overlap()
        self._args = CpuStepArgs(table=self.table.address, n=self.table.n)
        self._args.p_format, self._args.g_format, self._args.state_format = self.table.formats[:3]

    def look(self, lists: Lists) -> int:
        """Read and check the addresses; which lists moved."""
        return _looked(self.table, lists, self.fixed_storage)

    def launch(self, moved: int, counters: Tensor, scalars: AdamScalars, lr: Tensor | None, amp: Amp) -> None:
        """Update p, m, v and count the step; does nothing where ``amp.found_inf`` is not 0."""
        del moved  # the table on the host is the one that is read
        if amp.found_inf is not None and float(amp.found_inf):
            return
        self.table.count(counters)
        a = self._args
        a.steps, a.threads = counters.data_ptr(), torch.get_num_threads()
        a.lr = scalars.lr if lr is None else float(lr)
        a.beta1, a.beta2, a.eps, a.weight_decay = scalars.beta1, scalars.beta2, scalars.eps, scalars.weight_decay
        a.grad_scale = 1.0 if amp.grad_scale is None else float(amp.grad_scale)
        a.adamw, a.bias_correction = scalars.adamw, scalars.bias_correction
        self._module.step_table(ctypes.addressof(a), simd_request())


class GpuStep:
    """The tensors of one table on one GPU.

    Args:
        op: name for error texts.
        lists: p, g, m, v: ``n`` tensors each, a gradient may be None.
    """

    fixed_storage = False

    def __init__(self, op: str, lists: Lists) -> None:
        self.op = op
        self._launcher = fused_adam_launch.launcher()
        device = lists[0][0].device
        self._ordinal = device.index if device.index is not None else torch.cuda.current_device()
        self._launcher.prepare_device(self._ordinal)
        wide = lists[0][0].dtype is torch.float64
        dtypes = [next(x for x in tensors if x is not None).dtype for tensors in lists]
        chunk = fused_adam_launch.chunk_elements(FORMATS[dtype] for dtype in dtypes)
        self.table = DeviceTable(op, self._launcher.collect_addresses, lists, chunk)
        self.table.refuse_overlap()
        self._math = torch.float64 if wide else torch.float32
        # Counters, their version and the one step they all hold: as long as nobody else writes them, it is known.
        self._uniform: tuple[Tensor, int, int] | None = None
        self._coefficients: Tensor | None = None  # AdamStep [n], where steps differ or the device counts
        a = self._args = StepArgs(ordinal=self._ordinal, n=self.table.n, chunks=self.table.chunks.data_ptr())
        a.blocks = self.table.blocks
        a.p_format, a.g_format, a.state_format = self.table.formats[:3]
        self._address = ctypes.addressof(a)

    def look(self, lists: Lists) -> int:
        """Read and check the addresses; which lists moved."""
        return _looked(self.table, lists, self.fixed_storage)

    def launch(
        self,
        moved: int,
        counters: Tensor,
        scalars: AdamScalars,
        lr: Tensor | None,
        amp: Amp,
        noop_flag: Tensor | None = None,
    ) -> None:
        """Update p, m, v on the current stream of the device and count the step.

        Args:
            moved: from :meth:`look`.
            counters: int64 ``[n]``, on the host or on the device.
            scalars: with ``lr`` for the case that the next argument is None.
            lr: float32 tensor of one element on the device; needs device counters.
            amp: gradients are divided by ``grad_scale``; nothing happens where ``found_inf`` is not 0.
            noop_flag: int32 ``[1]`` on the device; nothing happens where it is not 0.
        """
        device = self.table.device
        if noop_flag is not None and (noop_flag.dtype is not torch.int32 or noop_flag.device != device):
            found = f"{noop_flag.dtype} on {noop_flag.device}"
            raise TensorError(f"{self.op}: noop_flag is {found}", f"expected torch.int32 on {device}", "")
        a = self._args
        a.stream = torch._C._cuda_getCurrentRawStream(self._ordinal)
        a.table = self.table.rows_for(moved)
        a.lr = scalars.lr
        a.beta1, a.beta2, a.eps, a.weight_decay = scalars.beta1, scalars.beta2, scalars.eps, scalars.weight_decay
        a.adamw, a.bias_correction = scalars.adamw, scalars.bias_correction
        keep = (_device_scalar(amp.grad_scale, self.table.device), _device_scalar(amp.found_inf, self.table.device))
        a.grad_scale, a.found_inf = (0 if t is None else t.data_ptr() for t in keep)
        a.noop_flag = 0 if noop_flag is None else noop_flag.data_ptr()
        if counters.device.type == "cpu":
            self._count_on_host(counters, scalars)
        else:
            self._count_on_device(counters, lr)
        self._launcher.step(self._address)

    def _count_on_host(self, counters: Tensor, scalars: AdamScalars) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{self.op}: steps are counted on the host inside a stream capture",
                "a replay would repeat the bias correction of the captured step",
                "FusedAdam(..., capturable=True)",
            )
        uniform = self._uniform
        known = uniform is not None and uniform[0] is counters and uniform[1] == counters._version
        self.table.count(counters)
        if known and uniform is not None and self.table.all_present:
            self._args.step, self._args.steps = uniform[2] + 1, 0
            self._uniform = (counters, counters._version, uniform[2] + 1)
            return
        counted = counters if self.table.all_present else counters[self.table.present]
        if counted.numel() == 0:
            self._args.step, self._args.steps = 1, 0
            return
        low, high = (int(x) for x in counted.aminmax())
        if low == high:
            self._args.step, self._args.steps = low, 0
            self._uniform = (counters, counters._version, low) if self.table.all_present else None
            return
        self._uniform = None
        t = counters.clamp(min=1).to(torch.float64)
        bias1 = 1.0 - scalars.beta1**t if scalars.bias_correction else torch.ones_like(t)
        bias2 = 1.0 - scalars.beta2**t if scalars.bias_correction else torch.ones_like(t)
        decay = torch.full_like(t, scalars.lr * scalars.weight_decay if scalars.adamw else 0.0)
        rows = torch.stack((scalars.lr / bias1, 1.0 / bias2.sqrt(), decay), dim=1).to(self._math)
        self._coefficients = rows.pin_memory().to(self.table.device, non_blocking=True)
        self._args.step, self._args.steps = 0, self._coefficients.data_ptr()

    def _count_on_device(self, counters: Tensor, lr: Tensor | None) -> None:
        if self._coefficients is None or self._coefficients.shape[0] != counters.numel():
            self._coefficients = torch.empty((counters.numel(), 3), dtype=self._math, device=counters.device)
        a = self._args
        a.counters, a.steps, a.step = counters.data_ptr(), self._coefficients.data_ptr(), 0
        lr = _device_scalar(lr, counters.device)
        a.lr_tensor = 0 if lr is None else lr.data_ptr()
        self._launcher.prepare_steps(self._address)


def _device_scalar(x: Tensor | None, device: torch.device) -> Tensor | None:
    """A scaler's value as float32 on a device; it may live on another one."""
    if x is None or (x.dtype is torch.float32 and x.device == device):
        return x
    return x.to(device=device, dtype=torch.float32, non_blocking=True)


def _looked(table: TensorTable, lists: Lists, fixed_storage: bool) -> int:
    moved = table.refresh(lists, fixed_storage)
    if moved & ~2:  # more than gradients
        table.refuse_overlap()
    return moved


AdamStep = CpuStep | GpuStep


def make_step(op: str, lists: Lists) -> AdamStep:
    """A step for tensors that share dtypes and device.

    Raises:
        UsageError: a device that has no kernel.
        TensorError, DtypeError: a tensor that no kernel takes.
    """
    p = lists[0][0]
    for i, x in enumerate(lists[0]):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise DtypeError(f"{op}: p[{i}] is {x.dtype}", "expected float32, float16, bfloat16 or float64", "")
    if p.device.type == "cpu":
        return CpuStep(op, lists)
    if p.device.type == "cuda":
        return GpuStep(op, lists)
    raise UsageError(
        f"{op}: parameters are on {p.device}", "there are kernels for cpu and cuda", "use torch.optim.AdamW"
    )
