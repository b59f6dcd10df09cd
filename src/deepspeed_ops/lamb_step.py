"""One LAMB step over the tensors of one table: in two passes on a GPU, in plain torch on the CPU."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.launch import BLOCK, Control, real
from deepspeed_ops.op_builder.errors import DtypeError, UsageError
from deepspeed_ops.scalar_checks import not_negative, two_betas
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_step import DeviceStep, Lists, TableStep
from deepspeed_ops.tensor_table import TensorTable

REDUCE_BLOCK = 256  # threads; kReduceBlock of csrc/common/reduce.cuh
NAMES = ("p", "g", "m", "v", "copy")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class LambScalars:
    """Scalars that all tensors of one call share.

    Attributes:
        lr: learning rate, per step.
        beta1, beta2: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment, or under it.
        weight_decay: times the parameter, part of the update before its norm is taken.
        max_coeff, min_coeff: the trust ratio is clamped to them.
        eps_inside_sqrt: ``sqrt(v + eps)`` in place of ``sqrt(v) + eps``.
        bias_correction: step size ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)`` in place of ``lr``.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_coeff: float
    min_coeff: float
    eps_inside_sqrt: bool
    bias_correction: bool

    def step_size(self, step: int) -> float:
        """What the trust ratio is multiplied with at a 1-based step."""
        if not self.bias_correction:
            return self.lr
        return self.lr * math.sqrt(1.0 - self.beta2**step) / (1.0 - self.beta1**step)


def checked(
    op: str,
    lr: Any,
    betas: Any,
    eps: Any,
    weight_decay: Any,
    max_coeff: Any,
    min_coeff: Any,
    eps_inside_sqrt: Any,
    bias_correction: Any,
) -> LambScalars:
    """Check the scalars and make a value of them.

    Raises:
        DtypeError: something is not a number.
        UsageError: a number outside its range.
    """
    beta1, beta2 = two_betas(op, betas)
    numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
    found = {name: not_negative(op, name, value) for name, value in numbers.items()}
    if found["min_coeff"] > found["max_coeff"]:
        raise UsageError(
            f"{op}: min_coeff is {found['min_coeff']} and max_coeff {found['max_coeff']}",
            "expected min_coeff <= max_coeff",
            "max_coeff=10.0, min_coeff=0.01",
        )
    return LambScalars(
        beta1=beta1, beta2=beta2, **found, eps_inside_sqrt=bool(eps_inside_sqrt), bias_correction=bool(bias_correction)
    )


def device_scalars(wide: bool) -> type[ctypes.Structure]:
    """``ds::LambScalars<M>`` of csrc/fused_lamb/fused_lamb.cuh."""
    names = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "weight_decay")

    class Scalars(ctypes.Structure):
        _fields_ = [
            *((name, real(wide)) for name in names),
            ("control", Control),
            ("eps_inside_sqrt", ctypes.c_int32),
        ]

    return Scalars


def device_ratios(wide: bool) -> type[ctypes.Structure]:
    """``ds::LambRatios<M>`` of csrc/fused_lamb/fused_lamb.cuh."""

    class Ratios(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_int64) for name in ("sums", "tensor_first", "g", "step_sizes")),
            ("step_size", real(wide)),
            ("min_ratio", ctypes.c_float),
            ("max_ratio", ctypes.c_float),
            ("ratios", ctypes.c_int64),
            ("factors", ctypes.c_int64),
        ]

    return Ratios


class GpuLambStep(DeviceStep):
    """On one GPU: p, g, m, v, copies of p (None where there is none).

    Attributes:
        ratios: float32 ``[n]`` on the device: trust ratios of the last step, 1 before the first.
    """

    library, names, coefficients = "fused_lamb", NAMES[:4], 1
    advice = "FusedLamb(..., capturable=True)"

    def __init__(self, op: str, lists: Lists) -> None:
        n = len(lists[0])
        super().__init__(op, lists if len(lists) == 5 else [*lists, [None] * n])
        device, blocks = self.table.device, self.table.blocks
        self._segments, self._tensor_first = self.table.segments()
        count = self._segments.shape[0]
        self._partials = torch.empty((blocks, 2), dtype=torch.float64, device=device)
        self._sums = torch.empty((count, 2), dtype=torch.float64, device=device)
        self.ratios = torch.ones(n, dtype=torch.float32, device=device)
        self._factors = torch.zeros(n, dtype=self.math, device=device)
        self._scalars: Any = device_scalars(self.wide)()
        self._ratios: Any = device_ratios(self.wide)(
            sums=self._sums.data_ptr(), tensor_first=self._tensor_first.data_ptr()
        )
        self._ratios.ratios, self._ratios.factors = self.ratios.data_ptr(), self._factors.data_ptr()
        self._control = Control()
        self._make_kernels()

    def _make_kernels(self) -> None:
        partials, segments, sums, factors = (
            ctypes.c_int64(x.data_ptr()) for x in (self._partials, self._segments, self._sums, self._factors)
        )
        table, scalars, kind, suffix = self.columns, self._scalars, self.kind, self.suffix
        self._first = self.kernel(f"fused_lamb_first_{kind}", BLOCK, table, scalars, partials)
        self._reduce = self.kernel("fused_lamb_reduce", REDUCE_BLOCK, partials, segments, sums)
        self._ratio = self.kernel(f"fused_lamb_ratio_{suffix}", BLOCK, self._ratios, self._control)
        self._second = self.kernel(f"fused_lamb_second_{kind}", BLOCK, table, scalars, factors)

    def look(self, lists: Lists) -> int:
        """Read and check the addresses; which lists moved, a bit each."""
        return super().look(lists if len(lists) == 5 else [*lists, [None] * self.table.n])

    def _fill(self, scalars: LambScalars, lr: Tensor | None, control: Control) -> None:
        s, r = self._scalars, self._ratios
        s.beta1, s.one_minus_beta1 = scalars.beta1, 1.0 - scalars.beta1
        s.beta2, s.one_minus_beta2 = scalars.beta2, 1.0 - scalars.beta2
        s.eps, s.weight_decay, s.eps_inside_sqrt = scalars.eps, scalars.weight_decay, scalars.eps_inside_sqrt
        s.control = control
        for name in ("grad_scale", "found_inf", "noop_flag"):
            setattr(self._control, name, getattr(control, name))
        r.g, r.min_ratio, r.max_ratio = self.columns.list[1], scalars.min_coeff, scalars.max_coeff

    def _uniform(self, step: int, scalars: LambScalars) -> tuple[float, ...]:
        return (scalars.step_size(step),)

    def _individual(self, t: Tensor, scalars: LambScalars) -> tuple[Tensor, ...]:
        if not scalars.bias_correction:
            return (torch.full_like(t, scalars.lr),)
        return (scalars.lr * (1.0 - scalars.beta2**t).sqrt() / (1.0 - scalars.beta1**t),)

    def _set_coefficients(self, values: tuple[float, ...], rows: int) -> None:
        self._ratios.step_sizes = rows
        if not rows:
            (self._ratios.step_size,) = values

    def _run(self, stream: int) -> None:
        self._first(stream, self.table.blocks)
        self._reduce(stream, self._segments.shape[0])
        self._ratio(stream, self.table.n)
        self._second(stream, self.table.blocks)


class CpuLambStep(TableStep):
    """On the CPU, in plain torch: for tests and small models; float32 arithmetic (float64 for float64).

    Attributes:
        ratios: float32 ``[n]``: trust ratios of the last step, 1 before the first.
    """

    names = NAMES[:4]

    def __init__(self, op: str, lists: Lists) -> None:
        self.table = TensorTable(op, None, lists, NAMES)
        self.table.refuse_overlap()
        self.ratios = torch.ones(len(lists[0]))
        self._lists = lists

    def look(self, lists: Lists) -> int:
        """Check the tensors; which lists moved, a bit each."""
        self._lists = lists
        return super().look(lists)

    def launch(
        self,
        moved: int,
        counters: Tensor,
        scalars: LambScalars,
        lr: Tensor | None,
        amp: Amp,
        noop_flag: Tensor | None = None,
    ) -> None:
        """Count the step and update; does nothing where ``amp.found_inf`` or ``noop_flag`` is not 0."""
        del moved, lr  # on the CPU a tensor lr is in the scalars
        lists, self._lists = self._lists, ()
        if any(flag is not None and float(flag) for flag in (amp.found_inf, noop_flag)):
            return
        self.table.count(counters)
        scale = 1.0 if amp.grad_scale is None else float(amp.grad_scale)
        for i, g in enumerate(lists[1]):
            if g is not None:
                copy = lists[4][i] if len(lists) == 5 else None
                tensors = (lists[0][i], g, lists[2][i], lists[3][i], copy)
                self.ratios[i] = _update(*tensors, scalars, int(counters[i]), scale)


def _update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, s: LambScalars, step: int, scale: float
) -> float:
    """One tensor's step; its trust ratio."""
    math_type = torch.float64 if p.dtype is torch.float64 else torch.float32
    gradient = g.to(math_type) * (1.0 / scale)
    m.copy_(s.beta1 * m.to(math_type) + (1.0 - s.beta1) * gradient)
    v.copy_(s.beta2 * v.to(math_type) + (1.0 - s.beta2) * gradient * gradient)
    wide_p, root = p.to(math_type), v.to(math_type)
    denom = (root + s.eps).sqrt() if s.eps_inside_sqrt else root.sqrt() + s.eps
    u = m.to(math_type) / denom
    if s.weight_decay:
        u += s.weight_decay * wide_p
    p_norm, u_norm = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (wide_p, u))
    ratio = 1.0
    if p_norm != 0.0 and u_norm != 0.0:
        ratio = p_norm / u_norm
        ratio = s.max_coeff if ratio > s.max_coeff else s.min_coeff if ratio < s.min_coeff else ratio
    new = wide_p - s.step_size(step) * ratio * u
    p.copy_(new)
    if copy is not None:
        copy.copy_(new)
    return ratio


LambStep = CpuLambStep | GpuLambStep


def make_step(op: str, lists: Lists) -> LambStep:
    """A step for tensors that share dtypes and device.

    Raises:
        UsageError: a device that has no kernel.
        TensorError, DtypeError: a tensor that no kernel takes.
    """
    p = lists[0][0]
    if p.dtype not in _FLOATS:
        raise DtypeError(f"{op}: p[0] is {p.dtype}", "expected float32, float16, bfloat16 or float64", "")
    if p.device.type == "cpu":
        return CpuLambStep(op, lists)
    if p.device.type == "cuda":
        return GpuLambStep(op, lists)
    raise UsageError(f"{op}: parameters are on {p.device}", "there are kernels for cuda, plain torch for cpu", "")


__all__ = ["CpuLambStep", "GpuLambStep", "LambScalars", "LambStep", "checked", "make_step"]
