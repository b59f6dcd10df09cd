"""One Adagrad step over the tensors of one table, or over rows of one tensor that a sparse gradient names."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DtypeError, TensorError
from deepspeed_ops.scalar_checks import not_negative
from deepspeed_ops.table_step import HostStep, Lists, choose, host_args, simd_request
from deepspeed_ops.tensor_checks import FORMATS, check_updated


@dataclass(frozen=True)
class AdagradScalars:
    """Scalars that all tensors of one call share.

    Attributes:
        lr: learning rate, per step.
        eps: added to the root of the sum of squares.
        weight_decay: times the parameter, added to the gradient (L2).
    """

    lr: float
    eps: float
    weight_decay: float


def checked(op: str, lr: Any, eps: Any, weight_decay: Any) -> AdagradScalars:
    """Check the scalars and make a value of them.

    Raises:
        DtypeError: something is not a number.
        UsageError: a number outside its range.
    """
    numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    return AdagradScalars(**{name: not_negative(op, name, value) for name, value in numbers.items()})


class CpuAdagradArgs(ctypes.Structure):
    """``ds::StepArgs`` of csrc/cpu_adagrad/cpu_adagrad.cpp, field by field."""

    _fields_ = host_args("lr", "eps", "weight_decay")


def fill_host(args: Any, scalars: AdagradScalars, lr: float) -> None:
    """Put the scalars into :class:`CpuAdagradArgs`."""
    args.lr, args.eps, args.weight_decay = lr, scalars.eps, scalars.weight_decay


class CpuAdagradStep(HostStep):
    """On the CPU: p, g, v, maybe copies of p."""

    library, names, Args = "cpu_adagrad", ("p", "g", "v"), CpuAdagradArgs
    instead = "torch.optim.Adagrad"

    def _fill(self, args: Any, scalars: AdagradScalars, lr: float) -> None:
        fill_host(args, scalars, lr)


def make_step(op: str, lists: Lists) -> CpuAdagradStep:
    """A step for tensors that share dtypes and device.

    Raises:
        UsageError: a device that has no kernel.
        TensorError, DtypeError: a tensor that no kernel takes.
    """
    step: CpuAdagradStep = choose(op, lists, CpuAdagradStep, None, "torch.optim.Adagrad")
    return step


class SparseRows:
    """The rows of one parameter that a sparse gradient names, as a table of their own: no gather, no scatter.

    Args:
        op: name for error texts.
        p: the parameter, contiguous, on the CPU.
        g: its gradient, sparse over the first dimensions of ``p``; rows named twice are added up first.
        v: sums of squares, contiguous, shape of ``p``.

    Raises:
        TensorError, DtypeError: a tensor that the kernel cannot use.
    """

    def __init__(self, op: str, p: Tensor, g: Tensor, v: Tensor) -> None:
        if p.device.type != "cpu" or g.device.type != "cpu":
            raise TensorError(f"{op}: p is on {p.device}, its gradient on {g.device}", "expected the CPU", "p.cpu()")
        if g.layout is not torch.sparse_coo or g.shape != p.shape:
            raise TensorError(
                f"{op}: a gradient of layout {g.layout} and shape {tuple(g.shape)}",
                f"expected sparse_coo and the parameter's shape {tuple(p.shape)}",
                "p.grad.to_sparse_coo()",
            )
        for name, x in (("p", p), ("v", v)):
            check_updated(op, name, 0, x)
            if not x.is_contiguous():
                raise TensorError(f"{op}: {name} has strides {x.stride()}", "sparse rows need row-major order", "")
        g = g.coalesce()
        if g.dtype not in FORMATS or torch.float64 in (g.dtype, p.dtype):
            raise DtypeError(f"{op}: p is {p.dtype}, its gradient {g.dtype}", "the kernel computes in float32", "")
        self.values = g.values().contiguous()
        self.p, self.v = p, v
        rows = _flat_index(g)
        width = self.values[0].numel() if rows.numel() else 0
        self.table = torch.empty((4, rows.numel()), dtype=torch.int64)
        self.table[0] = p.data_ptr() + rows * (width * p.element_size())
        self.table[1] = self.values.data_ptr() + torch.arange(rows.numel()) * (width * self.values.element_size())
        self.table[2] = v.data_ptr() + rows * (width * v.element_size())
        self.table[3] = width

    def launch(self, scalars: AdagradScalars, lr: float, grad_scale: float = 1.0) -> None:
        """Update the rows of p and v; other rows are not touched, not even by weight decay."""
        n = self.table.shape[1]
        if n == 0 or int(self.table[3, 0]) == 0:
            return
        formats = (FORMATS[x.dtype] for x in (self.p, self.values, self.v))
        steps = torch.ones(n, dtype=torch.int64)  # the formula does not know the step
        args: Any = CpuAdagradArgs(self.table.data_ptr(), steps.data_ptr(), n, *formats)
        fill_host(args, scalars, lr)
        args.grad_scale, args.threads = grad_scale, torch.get_num_threads()
        loader.host_module("cpu_adagrad").step_table(ctypes.addressof(args), simd_request())


def _flat_index(g: Tensor) -> Tensor:
    """Row of the parameter, flattened over the sparse dimensions, of each value of a coalesced gradient."""
    index = torch.zeros(g.indices().shape[1], dtype=torch.int64)
    for size, along in zip(g.shape[: g.sparse_dim()], g.indices(), strict=True):
        index = index * size + along
    return index
