"""Launches the kernels of ``fused_adam``: through the op's host library, or through the driver from Python.

The host library is the rule. On a machine that has neither a prebuilt one nor a C++ compiler, GPU code still needs no
compiler (NVRTC makes it), so the few launches of a step are made with ctypes instead: same kernels, same bits, about
10 us more a launch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import CompileFailed, CompilerMissing, JitForbidden, NoMatchingPart

OP = "fused_adam"
_BLOCK = 128  # threads; csrc/fused_adam/fused_adam.cuh
_F64 = 3
log = logging.getLogger("deepspeed_ops")


class StepArgs(ctypes.Structure):
    """``ds::StepArgs`` of csrc/fused_adam/fused_adam.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("ordinal", "stream", "table", "n", "chunks", "blocks")),
        *((name, ctypes.c_int64) for name in ("p_format", "g_format", "state_format")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_int64) for name in ("adamw", "bias_correction", "step", "steps")),
        *((name, ctypes.c_int64) for name in ("grad_scale", "found_inf", "noop_flag", "counters", "lr_tensor")),
    ]


class Launcher(Protocol):
    """What both ways of launching offer; the functions of csrc/fused_adam/fused_adam.cpp."""

    collect_addresses: Callable[[int], int] | None

    def prepare_device(self, ordinal: int) -> None:
        """Load the op's GPU part for a device."""

    def step(self, args: int) -> None:
        """Update p, m, v of a table. ``args``: address of :class:`StepArgs`."""

    def prepare_steps(self, args: int) -> None:
        """Count a step on the device."""

    def check_finite(self, args: int) -> None:
        """Set ``noop_flag`` where a gradient is not finite."""


def chunk_elements(formats: Iterable[int]) -> int:
    """Elements of one chunk, which one block updates: a pack a thread.

    Args:
        formats: of all tensors. A pack is 4 floats, 2 doubles, or 8 elements where some are half as wide.
    """
    kinds = set(formats)
    return _BLOCK * (2 if _F64 in kinds else 4 if kinds == {0} else 8)


@functools.cache
def launcher() -> Launcher:
    """The host library where there is one or one can be built, else Python.

    Raises:
        OpsError: neither works (no driver, ``DS_JIT=0`` with no part).
    """
    try:
        module: Launcher = loader.host_module(OP)
        return module
    except (CompilerMissing, CompileFailed, NoMatchingPart, JitForbidden) as exc:
        log.info("fused_adam launches from Python: %s", str(exc).splitlines()[0])
        return PythonLauncher()


class _Table(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("p", "g", "m", "v", "counts", "chunks")),
        *((name, ctypes.c_int32) for name in ("p_format", "g_format", "state_format")),
    ]


def _scalars_of(real: Any) -> type[ctypes.Structure]:
    class Scalars(ctypes.Structure):
        _fields_ = [
            *((name, real) for name in ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "l2")),
            *((name, real) for name in ("step_size", "inv_sqrt_bias2", "decay")),
            *((name, ctypes.c_int64) for name in ("steps", "grad_scale", "found_inf", "noop_flag")),
        ]

    return Scalars


_SCALARS = {False: _scalars_of(ctypes.c_float), True: _scalars_of(ctypes.c_double)}


class _Prepare(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("steps", "g", "out", "n", "lr_tensor")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "decay")),
        ("bias_correction", ctypes.c_int32),
        ("noop_flag", ctypes.c_int64),
        ("found_inf", ctypes.c_int64),
    ]


class PythonLauncher:
    """csrc/fused_adam/fused_adam.cpp in Python, over the driver. The structures are those of fused_adam.cuh."""

    collect_addresses: Callable[[int], int] | None = None

    def __init__(self) -> None:
        self._kernels: dict[int, Any] = {}

    def prepare_device(self, ordinal: int) -> None:
        """Load the op's GPU part for a device."""
        if ordinal not in self._kernels:
            from deepspeed_ops.op_builder.driver import Kernels

            self._kernels[ordinal] = Kernels(loader.device_image(OP, ordinal), ordinal)

    def _launch(self, a: StepArgs, kernel: str, grid: int, block: int, *args: Any) -> None:
        self.prepare_device(a.ordinal)
        self._kernels[a.ordinal].launch(kernel, (grid, 1, 1), (block, 1, 1), 0, a.stream, args)

    @staticmethod
    def _table(a: StepArgs) -> _Table:
        row = a.n * 8
        rows = [a.table + i * row for i in range(5)]
        return _Table(*rows, a.chunks, a.p_format, a.g_format, a.state_format)

    def step(self, args: int) -> None:
        """Update p, m, v of a table."""
        a = StepArgs.from_address(args)
        wide = a.p_format == _F64
        bias1 = 1.0 - a.beta1**a.step if a.bias_correction else 1.0
        bias2 = 1.0 - a.beta2**a.step if a.bias_correction else 1.0
        # Where steps is set, the scalars come from there and step is 0.
        step_size, inv_sqrt_bias2 = (0.0, 0.0) if a.steps else (a.lr / bias1, 1.0 / math.sqrt(bias2))
        decay, l2 = (a.lr * a.weight_decay, 0.0) if a.adamw else (0.0, a.weight_decay)
        head = (a.beta1, 1.0 - a.beta1, a.beta2, 1.0 - a.beta2, a.eps, l2, step_size, inv_sqrt_bias2, decay)
        scalars = _SCALARS[wide](*head, a.steps, a.grad_scale, a.found_inf, a.noop_flag)
        floats = not (a.p_format or a.g_format or a.state_format)
        kernel = "fused_adam_f64" if wide else "fused_adam_f32" if floats else "fused_adam_mixed"
        self._launch(a, kernel, a.blocks, _BLOCK, self._table(a), scalars)

    def prepare_steps(self, args: int) -> None:
        """Count a step on the device."""
        a = StepArgs.from_address(args)
        decay = a.weight_decay if a.adamw else 0.0
        packed = _Prepare(a.counters, a.table + a.n * 8, a.steps, a.n, a.lr_tensor, a.lr, a.beta1, a.beta2, decay)
        packed.bias_correction, packed.noop_flag, packed.found_inf = a.bias_correction, a.noop_flag, a.found_inf
        kernel = "fused_adam_prepare_f64" if a.p_format == _F64 else "fused_adam_prepare_f32"
        self._launch(a, kernel, (a.n + 255) // 256, 256, packed)

    def check_finite(self, args: int) -> None:
        """Set ``noop_flag`` where a gradient is not finite."""
        a = StepArgs.from_address(args)
        self._launch(a, "check_finite", a.blocks, _BLOCK, self._table(a), ctypes.c_int64(a.noop_flag))
