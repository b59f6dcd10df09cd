"""One Lion step over the tensors of one table: its scalars, checked, and as the kernels take them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepspeed_ops.launch import BLOCK, Control, real
from deepspeed_ops.scalar_checks import not_negative, two_betas
from deepspeed_ops.table_step import DeviceStep, HostStep, Lists, choose, host_args


@dataclass(frozen=True)
class LionScalars:
    """Scalars that all tensors of one call share.

    Attributes:
        lr: learning rate, per step: how far each element moves.
        beta1: weight of the momentum in the direction, in [0, 1).
        beta2: decay rate of the momentum, in [0, 1).
        weight_decay: per step, times ``lr``.
    """

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


def checked(op: str, lr: Any, betas: Any, weight_decay: Any) -> LionScalars:
    """Check the scalars and make a value of them.

    Raises:
        DtypeError: something is not a number.
        UsageError: a number outside its range.
    """
    beta1, beta2 = two_betas(op, betas)
    return LionScalars(not_negative(op, "lr", lr), beta1, beta2, not_negative(op, "weight_decay", weight_decay))


class CpuLionArgs(ctypes.Structure):
    """``ds::StepArgs`` of csrc/cpu_lion/cpu_lion.cpp, field by field."""

    _fields_ = host_args("lr", "beta1", "beta2", "weight_decay")


def fill_host(args: Any, scalars: LionScalars, lr: float) -> None:
    """Put the scalars into :class:`CpuLionArgs`."""
    args.lr, args.weight_decay = lr, scalars.weight_decay
    args.beta1, args.beta2 = scalars.beta1, scalars.beta2


class CpuLionStep(HostStep):
    """On the CPU: p, g, m, maybe copies of p."""

    library, names, Args = "cpu_lion", ("p", "g", "m"), CpuLionArgs
    instead = "FusedLion on a GPU"

    def _fill(self, args: Any, scalars: LionScalars, lr: float) -> None:
        fill_host(args, scalars, lr)


def device_scalars(wide: bool) -> type[ctypes.Structure]:
    """``ds::LionScalars<M>`` of csrc/fused_lion/fused_lion.cuh."""

    class Scalars(ctypes.Structure):
        _fields_ = [
            ("lr", ctypes.c_double),
            ("weight_decay", ctypes.c_double),
            ("lr_tensor", ctypes.c_int64),
            *((name, real(wide)) for name in ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2")),
            ("control", Control),
        ]

    return Scalars


class GpuLionStep(DeviceStep):
    """On one GPU: p, g, m."""

    library, names = "fused_lion", ("p", "g", "m")
    advice = "FusedLion(..., capturable=True)"

    def __init__(self, op: str, lists: Lists) -> None:
        super().__init__(op, lists)
        self._scalars: Any = device_scalars(self.wide)()
        self._step = self.kernel(f"fused_lion_{self.kind}", BLOCK, self.columns, self._scalars)

    def _fill(self, scalars: LionScalars, lr: Tensor | None, control: Control) -> None:
        s = self._scalars
        s.lr, s.weight_decay, s.lr_tensor = scalars.lr, scalars.weight_decay, 0 if lr is None else lr.data_ptr()
        s.beta1, s.one_minus_beta1 = scalars.beta1, 1.0 - scalars.beta1
        s.beta2, s.one_minus_beta2 = scalars.beta2, 1.0 - scalars.beta2
        s.control = control

    def _run(self, stream: int) -> None:
        self._step(stream, self.table.blocks)


LionStep = CpuLionStep | GpuLionStep


def make_step(op: str, lists: Lists) -> LionStep:
    """A step for tensors that share dtypes and device.

    Raises:
        UsageError: a device that has no kernel.
        TensorError, DtypeError: a tensor that no kernel takes.
    """
    step: LionStep = choose(op, lists, CpuLionStep, GpuLionStep, "move them to the CPU or a GPU")
    return step
