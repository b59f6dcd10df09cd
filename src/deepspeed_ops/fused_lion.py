"""``fused_lion``: Lion on many GPU tensors in one launch, under DeepSpeed's name and as
``torch.ops.deepspeed.fused_lion_``. On CPU tensors it does the same through ``cpu_lion``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from deepspeed_ops import launch
from deepspeed_ops.lion_step import checked, make_step
from deepspeed_ops.op_builder.errors import TensorError, UsageError
from deepspeed_ops.registry import register
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_op import update_

OP = "fused_lion"


def module() -> ModuleType:
    """What ``FusedLionBuilder().load()`` returns: this module, ready to launch.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    launch.launcher(OP)
    return sys.modules[__name__]


def multi_tensor_lion(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    step: int,
    weight_decay: float,
) -> None:
    """One step of many tensors, in place. DeepSpeed's name and order.

    Args:
        chunk_size: taken and not used; the kernel's own chunking is the fastest.
        noop_flag: int32 tensor of one element on the tensors' device; not 0: nothing happens.
        tensor_lists: ``[g], [p], [m]``; float32, float16, bfloat16 or float64 on one device. Mutated: p, m.
        lr, beta1, beta2, weight_decay: scalars of the step.
        step: 1-based number of this step; the formula does not use it.

    Raises:
        UsageError: a scalar outside its range.
        TensorError, DtypeError: tensors that no kernel takes.
    """
    del chunk_size
    if step < 1:
        raise UsageError(f"{OP}: step is {step}", "the first step is 1", "step=1")
    if len(tensor_lists) != 3:
        raise TensorError(f"{OP}: {len(tensor_lists)} lists", "expected gradients, parameters and momentum", "")
    g, p, m = (list(x) for x in tensor_lists)
    if not p:
        return
    steps = list(torch.full((len(p),), step - 1, dtype=torch.int64).unbind())
    update_(OP, make_step, (p, g, m), steps, checked(OP, lr, (beta1, beta2), weight_decay), noop_flag=noop_flag)


def _fused_lion_(
    p: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    steps: list[Tensor],
    lr_tensor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    noop_flag: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    scalars = checked(OP, lr, (beta1, beta2), weight_decay)
    update_(OP, make_step, (p, g, m), steps, scalars, lr_tensor, Amp(grad_scale, found_inf), noop_flag)


def _fake(*_args: object) -> None:
    """Updates its arguments in place and returns nothing: no shape to infer."""


fused_lion_ = register(OP, "fused_lion_", {"CPU": _fused_lion_, "CUDA": _fused_lion_}, _fake)
