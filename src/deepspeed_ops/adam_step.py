"""One Adam step over the tensors of one table: its scalars as the kernels take them."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.adam_scalars import AdamScalars
from deepspeed_ops.launch import BLOCK, Control, real
from deepspeed_ops.table_step import DeviceStep, HostStep, Lists, choose, host_args

_SCALARS = ("lr", "beta1", "beta2", "eps", "weight_decay")


class CpuStepArgs(ctypes.Structure):
    """``ds::StepArgs`` of csrc/cpu_adam/cpu_adam.cpp, field by field."""

    _fields_ = host_args(*_SCALARS, flags=("adamw", "bias_correction"))


def fill_host(args: Any, scalars: AdamScalars, lr: float) -> None:
    """Put the scalars into :class:`CpuStepArgs`."""
    args.lr, args.beta1, args.beta2, args.eps = lr, scalars.beta1, scalars.beta2, scalars.eps
    args.weight_decay = scalars.weight_decay
    args.adamw, args.bias_correction = scalars.adamw, scalars.bias_correction


class CpuStep(HostStep):
    """On the CPU: p, g, m, v, maybe copies of p."""

    library, names, Args = "cpu_adam", ("p", "g", "m", "v"), CpuStepArgs
    instead = "torch.optim.AdamW"

    def _fill(self, args: Any, scalars: AdamScalars, lr: float) -> None:
        fill_host(args, scalars, lr)


def device_scalars(wide: bool) -> type[ctypes.Structure]:
    """``ds::AdamScalars<M>`` of csrc/fused_adam/fused_adam.cuh."""

    class Scalars(ctypes.Structure):
        _fields_ = [
            *((name, real(wide)) for name in ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "l2")),
            *((name, real(wide)) for name in ("step_size", "inv_sqrt_bias2", "decay")),
            ("steps", ctypes.c_int64),
            ("control", Control),
        ]

    return Scalars


class GpuStep(DeviceStep):
    """On one GPU: p, g, m, v."""

    library, names, coefficients = "fused_adam", ("p", "g", "m", "v"), 3
    advice = "FusedAdam(..., capturable=True)"

    def __init__(self, op: str, lists: Lists) -> None:
        super().__init__(op, lists)
        self._scalars: Any = device_scalars(self.wide)()
        self._step = self.kernel(f"fused_adam_{self.kind}", BLOCK, self.columns, self._scalars)

    def _fill(self, scalars: AdamScalars, lr: Tensor | None, control: Control) -> None:
        s = self._scalars
        s.beta1, s.one_minus_beta1 = scalars.beta1, 1.0 - scalars.beta1
        s.beta2, s.one_minus_beta2 = scalars.beta2, 1.0 - scalars.beta2
        s.eps, s.l2 = scalars.eps, 0.0 if scalars.adamw else scalars.weight_decay
        s.control = control

    def _decay(self, scalars: AdamScalars) -> float:
        return scalars.weight_decay if scalars.adamw else 0.0

    def _uniform(self, step: int, scalars: AdamScalars) -> tuple[float, ...]:
        bias1 = 1.0 - scalars.beta1**step if scalars.bias_correction else 1.0
        bias2 = 1.0 - scalars.beta2**step if scalars.bias_correction else 1.0
        return scalars.lr / bias1, 1.0 / math.sqrt(bias2), scalars.lr * self._decay(scalars)

    def _individual(self, t: Tensor, scalars: AdamScalars) -> tuple[Tensor, ...]:
        bias1 = 1.0 - scalars.beta1**t if scalars.bias_correction else torch.ones_like(t)
        bias2 = 1.0 - scalars.beta2**t if scalars.bias_correction else torch.ones_like(t)
        decay = torch.full_like(t, scalars.lr * self._decay(scalars))
        return scalars.lr / bias1, 1.0 / bias2.sqrt(), decay

    def _set_coefficients(self, values: tuple[float, ...], rows: int) -> None:
        s = self._scalars
        s.steps = rows
        if not rows:
            s.step_size, s.inv_sqrt_bias2, s.decay = values

    def _run(self, stream: int) -> None:
        self._step(stream, self.table.blocks)


AdamStep = CpuStep | GpuStep


def make_step(op: str, lists: Lists) -> AdamStep:
    """A step for tensors that share dtypes and device.

    Raises:
        UsageError: a device that has no kernel.
        TensorError, DtypeError: a tensor that no kernel takes.
    """
    step: AdamStep = choose(op, lists, CpuStep, GpuStep, "use torch.optim.AdamW")
    return step
