"""Launches kernels that take their parameters as plain structures: through an op's host library, or from Python.

The host library is the rule. On a machine that has neither a prebuilt one nor a C++ compiler, GPU code still needs no
compiler (NVRTC makes it), so the few launches of a step are made with ctypes instead: same kernels, same bits, about
10 us more a launch.

The structures here are those of ``csrc/common/multi_tensor.cuh`` and ``csrc/common/launch.h``, field by field; each
op's own are in its ``*_step`` module (tests/ops/test_structures.py compares them all with the compiler's).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import CompileFailed, CompilerMissing, JitForbidden, NoMatchingPart

BLOCK = 128  # threads; kBlock of csrc/common/multi_tensor.cuh
PREPARE_BLOCK = 256  # threads of a kernel that takes one tensor a thread
F64 = 3  # format code
log = logging.getLogger("deepspeed_ops")
_POINTER = ctypes.c_int64


class _LaunchArgs(ctypes.Structure):
    """``ds::LaunchArgs``."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("ordinal", "stream", "kernel", "grid", "block", "shared_bytes", "count", "parameters")
    ]


class Control(ctypes.Structure):
    """``ds::Control``: addresses of what the device decides, or 0."""

    _fields_ = [(name, _POINTER) for name in ("grad_scale", "found_inf", "noop_flag")]


class Prepare(ctypes.Structure):
    """``ds::PrepareArgs``: counting a step on the device."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("steps", "g", "out", "n", "lr_tensor")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "decay")),
        ("bias_correction", ctypes.c_int32),
        ("noop_flag", _POINTER),
        ("found_inf", _POINTER),
    ]


class Table(ctypes.Structure):
    """``ds::Table<kLists>``; a subclass per number of lists."""

    list: Any
    counts: int
    chunks: int
    format: Any

    def point(self, rows: int, n: int) -> None:
        """Set the addresses of the rows of a table of ``n`` tensors that lies at ``rows`` in device memory."""
        lists = len(self.list)
        for i in range(lists):
            self.list[i] = rows + 8 * n * i
        self.counts = rows + 8 * n * lists


@functools.cache
def table_type(lists: int) -> type[Table]:
    """The table with so many lists."""
    fields = [
        ("list", _POINTER * lists),
        ("counts", _POINTER),
        ("chunks", _POINTER),
        ("format", ctypes.c_int32 * lists),
    ]
    return type(f"Table{lists}", (Table,), {"_fields_": fields})


def real(wide: bool) -> Any:
    """The arithmetic type: double or float."""
    return ctypes.c_double if wide else ctypes.c_float


def kind_of(formats: Iterable[int]) -> str:
    """The kind of kernel for tensors of these formats: ``f32``, ``f64``, or ``mixed`` where some are half as wide."""
    kinds = set(formats)
    return "f64" if F64 in kinds else "f32" if kinds == {0} else "mixed"


def chunk_elements(kind: str) -> int:
    """Elements of one chunk, which one block updates: a pack a thread, of 16 bytes of its narrowest format or 32."""
    return BLOCK * {"f32": 4, "f64": 2, "mixed": 8}[kind]


class Launcher(Protocol):
    """What both ways of launching offer; the functions of ``csrc/common/launch.h``."""

    collect_addresses: Callable[[int], int] | None

    def prepare_device(self, ordinal: int) -> None:
        """Load the op's GPU part for a device."""

    def launch(self, args: int) -> None:
        """Launch a kernel. ``args``: address of ``_LaunchArgs``."""


@functools.cache
def launcher(op: str) -> Launcher:
    """The op's host library where there is one or one can be built, else Python.

    Raises:
        OpsError: neither works (no driver, ``DS_JIT=0`` with no part).
    """
    try:
        module: Launcher = loader.host_module(op)
        return module
    except (CompilerMissing, CompileFailed, NoMatchingPart, JitForbidden) as exc:
        log.info("%s launches from Python: %s", op, str(exc).splitlines()[0])
        return PythonLauncher(op)


class PythonLauncher:
    """``csrc/common/launch.h`` in Python, over the driver.

    Args:
        op: whose kernels.
    """

    collect_addresses: Callable[[int], int] | None = None

    def __init__(self, op: str) -> None:
        self._op = op
        self._kernels: dict[int, Any] = {}

    def prepare_device(self, ordinal: int) -> None:
        """Load the op's GPU part for a device."""
        if ordinal not in self._kernels:
            from deepspeed_ops.op_builder.driver import Kernels

            self._kernels[ordinal] = Kernels(loader.device_image(self._op, ordinal), ordinal)

    def launch(self, args: int) -> None:
        """Launch a kernel. ``args``: address of ``_LaunchArgs``."""
        a = _LaunchArgs.from_address(args)
        self.prepare_device(a.ordinal)
        pointers = (ctypes.c_int64 * a.count).from_address(a.parameters)
        parameters = [
            ctypes.c_byte.from_address(p) for p in pointers
        ]  # the driver reads as much as the kernel declares
        name = ctypes.string_at(a.kernel).decode()
        self._kernels[a.ordinal].launch(name, (a.grid, 1, 1), (a.block, 1, 1), a.shared_bytes, a.stream, parameters)


class Launch:
    """One kernel with its parameters, to be launched again and again; the parameters are read at each launch.

    Args:
        by: launches it.
        ordinal: the device.
        kernel: the entry point.
        block: threads of a block.
        parameters: one ctypes value per parameter, kept.
    """

    def __init__(self, by: Launcher, ordinal: int, kernel: str, block: int, *parameters: Any) -> None:
        pointers = (ctypes.c_int64 * len(parameters))(*map(ctypes.addressof, parameters))
        name = ctypes.create_string_buffer(kernel.encode())
        self._args = _LaunchArgs(ordinal, 0, ctypes.addressof(name), 0, block, 0, len(parameters))
        self._args.parameters = ctypes.addressof(pointers)
        self._kept = (parameters, pointers, name)
        self._address = ctypes.addressof(self._args)
        self._launch = by.launch

    def __call__(self, stream: int, grid: int) -> None:
        """Launch on a stream (``cudaStream_t`` as an integer); a grid of 0 blocks launches nothing."""
        if grid:
            self._args.stream, self._args.grid = stream, grid
            self._launch(self._address)
