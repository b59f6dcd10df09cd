"""One step of an op over the tensors of one table: on the CPU, or on one GPU. Knows no formula.

A table's tensors share dtypes and device. ``counters`` is int64 ``[n]``: how many steps each tensor has taken; a step
counts up those that have a gradient. On a GPU the counters lie on the host as long as the host alone decides whether a
step counts, and on the device where the device does (a captured graph, ``found_inf``): then nothing waits for the
device.
"""

from __future__ import annotations

import ctypes
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_ops import launch
from deepspeed_ops.device_table import DeviceTable
from deepspeed_ops.launch import PREPARE_BLOCK, Control, Launch, Prepare, table_type
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.tensor_checks import FORMATS
from deepspeed_ops.tensor_table import TensorTable

Lists = Sequence[list[Any]]
_ONLY_GRADIENTS = 2


def simd_request() -> str:
    """The SIMD level that ``DS_SIMD`` asks for; empty for the best one."""
    return os.environ.get("DS_SIMD", "").strip().lower()


def host_args(*doubles: str, flags: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Fields of an op's ``StepArgs`` on the CPU: the table, the op's scalars, flags, the number of threads."""
    return [
        *((name, ctypes.c_int64) for name in ("table", "steps", "n", "p_format", "g_format", "state_format")),
        *((name, ctypes.c_double) for name in (*doubles, "grad_scale")),
        *((name, ctypes.c_int64) for name in (*flags, "threads")),
    ]


class TableStep:
    """What both kinds share.

    Attributes:
        names: of the lists that the op always has: p, g and its moments.
        fixed_storage: the user's promise that only gradients move.
    """

    names: ClassVar[tuple[str, ...]]
    fixed_storage = False
    table: TensorTable

    def look(self, lists: Lists) -> int:
        """Read and check the addresses; which lists moved, a bit each.

        Raises:
            TensorError, DtypeError: a tensor that the kernel cannot use.
        """
        moved = self.table.refresh(lists, self.fixed_storage)
        if moved & ~_ONLY_GRADIENTS:
            self.table.refuse_overlap()
        return moved


class HostStep(TableStep):
    """The tensors of one table on the CPU.

    Args:
        op: name for error texts.
        lists: p, g, the moments, maybe half precision copies of p: ``n`` tensors each, a gradient may be None.
    """

    library: ClassVar[str]
    Args: ClassVar[type[ctypes.Structure]]
    instead: ClassVar[str]  # for float64

    def __init__(self, op: str, lists: Lists) -> None:
        if lists[0][0].dtype is torch.float64:
            raise DtypeError(
                f"{op}: parameters are float64",
                f"{self.library} computes in float32",
                f"use {self.instead} for float64",
            )
        self._module = loader.host_module(self.library)
        names = (*self.names, "copy")
        self.table = TensorTable(op, self._module.collect_addresses, lists, names)
        self.table.refuse_overlap()
        self._args: Any = self.Args(table=self.table.address, n=self.table.n)
        self._args.p_format, self._args.g_format, self._args.state_format = self.table.formats[:3]
        self._copy_format = self.table.formats[-1] if len(lists) > len(self.names) else None

    @abstractmethod
    def _fill(self, args: Any, scalars: Any, lr: float) -> None:
        """Put the op's scalars into its ``Args``."""

    def launch(
        self,
        moved: int,
        counters: Tensor,
        scalars: Any,
        lr: Tensor | None,
        amp: Amp,
        noop_flag: Tensor | None = None,
    ) -> None:
        """Count the step and update; does nothing where ``amp.found_inf`` or ``noop_flag`` is not 0."""
        del moved  # the table on the host is the one that is read
        if any(flag is not None and float(flag) for flag in (amp.found_inf, noop_flag)):
            return
        self.table.count(counters)
        a = self._args
        a.steps, a.threads = counters.data_ptr(), torch.get_num_threads()
        a.grad_scale = 1.0 if amp.grad_scale is None else float(amp.grad_scale)
        self._fill(a, scalars, scalars.lr if lr is None else float(lr))
        if self._copy_format is None:
            self._module.step_table(ctypes.addressof(a), simd_request())
        else:
            self._module.step_table_copy(ctypes.addressof(a), self._copy_format, simd_request())


class DeviceStep(TableStep):
    """The tensors of one table on one GPU.

    Args:
        op: name for error texts.
        lists: p, g, the moments and, where the kernel has it, copies of p: ``n`` tensors each; a gradient or a copy may
            be None.
    """

    library: ClassVar[str]
    coefficients: ClassVar[int] = 0  # scalars a tensor that depend on the number of its steps
    advice: ClassVar[str]  # for a capture whose steps are counted on the host

    def __init__(self, op: str, lists: Lists) -> None:
        self.op = op
        self.launcher = launch.launcher(self.library)
        device = lists[0][0].device
        self.ordinal = device.index if device.index is not None else torch.cuda.current_device()
        self.launcher.prepare_device(self.ordinal)
        firsts = [next((x for x in tensors if x is not None), None) for tensors in lists]
        dtypes = {x.dtype for x in firsts if x is not None}
        self.kind = launch.kind_of(FORMATS[dtype] for dtype in dtypes)
        self.wide = self.kind == "f64"
        chunk = launch.chunk_elements(self.kind)
        self.table: DeviceTable = DeviceTable(op, self.launcher.collect_addresses, lists, chunk, (*self.names, "copy"))
        self.table.refuse_overlap()
        if self.wide and dtypes != {torch.float64}:
            found = ", ".join(sorted(map(str, dtypes)))
            raise DtypeError(f"{op}: dtypes {found}", "float64 does not mix with other dtypes", "one dtype for all")
        self.math = torch.float64 if self.wide else torch.float32
        self.suffix = "f64" if self.wide else "f32"
        # Counters, their version and the one step they all hold: as long as nobody else writes them, it is known.
        self._counted: tuple[Tensor, int, int] | None = None
        self.columns = table_type(len(lists))(chunks=self.table.chunks.data_ptr())
        for i, code in enumerate(self.table.formats):
            self.columns.format[i] = code
        self._rows = 0
        self._rows_of_steps: Tensor | None = None  # [n][coefficients], where steps differ or the device counts
        self._prepare_args = Prepare(n=self.table.n)
        self._prepare = self.kernel(self.prepare_kernel(), PREPARE_BLOCK, self._prepare_args)

    def kernel(self, name: str, block: int, *parameters: Any) -> Launch:
        """One of the op's kernels with its parameters."""
        return Launch(self.launcher, self.ordinal, name, block, *parameters)

    # --- what an op says ---

    def prepare_kernel(self) -> str:
        """The kernel that counts a step and makes the coefficients on the device."""
        return f"{self.library}_prepare_{self.suffix}" if self.coefficients else f"{self.library}_prepare"

    @abstractmethod
    def _fill(self, scalars: Any, lr: Tensor | None, control: Control) -> None:
        """Put the scalars of the step into the kernels' parameters."""

    def _decay(self, scalars: Any) -> float:
        """``decay`` of the prepare kernel."""
        return 0.0

    def _uniform(self, step: int, scalars: Any) -> tuple[float, ...]:
        """The coefficients of a step, the same for all tensors."""
        return ()

    def _individual(self, t: Tensor, scalars: Any) -> tuple[Tensor, ...]:
        """The same for steps float64 ``[n]``."""
        return ()

    def _set_coefficients(self, values: tuple[float, ...], rows: int) -> None:
        """Use these coefficients for all tensors; or, where ``rows`` is not 0, those that lie there."""

    @abstractmethod
    def _run(self, stream: int) -> None:
        """Launch the kernels of a step."""

    # --- a step ---

    def launch(
        self,
        moved: int,
        counters: Tensor,
        scalars: Any,
        lr: Tensor | None,
        amp: Amp,
        noop_flag: Tensor | None = None,
    ) -> None:
        """Count the step and update, on the current stream of the device.

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
        keep = (on_device(amp.grad_scale, device), on_device(amp.found_inf, device), on_device(lr, device))
        scale, inf, lr = keep
        control = Control(*(0 if t is None else t.data_ptr() for t in (scale, inf, noop_flag)))
        stream = torch._C._cuda_getCurrentRawStream(self.ordinal)
        rows = self.table.rows_for(moved)
        if rows != self._rows:
            self._rows = rows
            self.columns.point(rows, self.table.n)
        self._fill(scalars, lr, control)
        if counters.device.type == "cpu":
            self._count_on_host(counters, scalars)
        else:
            self._count_on_device(counters, scalars, lr, control, stream)
        self._run(stream)

    def _count_on_host(self, counters: Tensor, scalars: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{self.op}: steps are counted on the host inside a stream capture",
                "a replay would repeat the scalars of the captured step",
                self.advice,
            )
        last = self._counted
        known = last is not None and last[0] is counters and last[1] == counters._version
        self.table.count(counters)
        if not self.coefficients:
            return
        everything = self.table.all_present
        if known and last is not None and everything:
            low = high = last[2] + 1
        else:
            counted = counters if everything else counters[self.table.present]
            low, high = (int(x) for x in counted.aminmax()) if counted.numel() else (1, 1)
        self._counted = (counters, counters._version, low) if everything and low == high else None
        if low == high:
            self._set_coefficients(self._uniform(low, scalars), 0)
            return
        t = counters.clamp(min=1).to(torch.float64)
        rows = torch.stack(self._individual(t, scalars), dim=1).to(self.math)
        self._rows_of_steps = rows.pin_memory().to(self.table.device, non_blocking=True)
        self._set_coefficients((), self._rows_of_steps.data_ptr())

    def _count_on_device(
        self, counters: Tensor, scalars: Any, lr: Tensor | None, control: Control, stream: int
    ) -> None:
        rows = 0
        if self.coefficients:
            if self._rows_of_steps is None or self._rows_of_steps.shape[0] != counters.numel():
                shape = (counters.numel(), self.coefficients)
                self._rows_of_steps = torch.empty(shape, dtype=self.math, device=counters.device)
            rows = self._rows_of_steps.data_ptr()
        a = self._prepare_args
        a.steps, a.g, a.out = counters.data_ptr(), self.columns.list[1], rows
        a.lr_tensor = 0 if lr is None else lr.data_ptr()
        a.lr, a.decay = scalars.lr, self._decay(scalars)
        a.beta1, a.beta2 = getattr(scalars, "beta1", 0.0), getattr(scalars, "beta2", 0.0)
        a.bias_correction = getattr(scalars, "bias_correction", False)
        a.noop_flag, a.found_inf = control.noop_flag, control.found_inf
        self._prepare(stream, -(-self.table.n // PREPARE_BLOCK))
        self._set_coefficients((), rows)


def on_device(x: Tensor | None, device: torch.device) -> Tensor | None:
    """A scalar's value as float32 on a device; it may live on another one."""
    if x is None or (x.dtype is torch.float32 and x.device == device):
        return x
    return x.to(device=device, dtype=torch.float32, non_blocking=True)


def choose(op: str, lists: Lists, on_host: type[HostStep], on_gpu: type[DeviceStep] | None, instead: str) -> Any:
    """The step for tensors that share dtypes and device.

    Args:
        op: name for error texts.
        lists: p, g and the moments.
        on_host, on_gpu: the op's two kinds.
        instead: what to use on other devices.

    Raises:
        UsageError: a device that has no kernel.
        TensorError, DtypeError: a tensor that no kernel takes.
    """
    p = lists[0][0]
    for i, x in enumerate(lists[0]):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise DtypeError(f"{op}: p[{i}] is {x.dtype}", "expected float32, float16, bfloat16 or float64", "")
    if p.device.type == "cpu":
        return on_host(op, lists)
    if p.device.type == "cuda" and on_gpu is not None:
        return on_gpu(op, lists)
    kernels = "cpu" if on_gpu is None else "cpu and cuda"
    raise UsageError(f"{op}: parameters are on {p.device}", f"there are kernels for {kernels}", instead)
