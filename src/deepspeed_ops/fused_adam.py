"""``fused_adam``: Adam and AdamW on many GPU tensors in one launch, under DeepSpeed's names and as
``torch.ops.deepspeed.fused_adam_``. On CPU tensors it does the same through ``cpu_adam``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from deepspeed_ops import launch
from deepspeed_ops.adam_scalars import checked
from deepspeed_ops.adam_step import make_step
from deepspeed_ops.device_table import DeviceTable
from deepspeed_ops.launch import BLOCK, Launch, table_type
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.registry import register, updated_in_place
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_op import update_
from deepspeed_ops.tensor_checks import FORMATS

OP = "fused_adam"


def module() -> ModuleType:
    """What ``FusedAdamBuilder().load()`` returns: this module, ready to launch.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    launch.launcher(OP)
    return sys.modules[__name__]


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of many tensors, in place. DeepSpeed's name and order.

    Args:
        chunk_size: taken and not used; the kernel's own chunking is the fastest.
        noop_flag: int32 tensor of one element on the tensors' device; not 0: nothing happens.
        tensor_lists: ``[g], [p], [m], [v]``; float32, float16, bfloat16 or float64 on one device. Mutated: p, m, v.
        lr, beta1, beta2, epsilon, weight_decay: scalars of the step.
        step: 1-based number of this step.
        mode: 0 for L2, 1 for AdamW.
        bias_correction: 0 or 1.

    Raises:
        UsageError: a mode or a scalar outside its range.
        TensorError, DtypeError: tensors that no kernel takes.
    """
    del chunk_size
    if mode not in (0, 1):
        raise UsageError(f"{OP}: mode is {mode!r}", "expected 0 (L2) or 1 (AdamW)", "mode=1")
    if step < 1:
        raise UsageError(f"{OP}: step is {step}", "the first step is 1", "step=1")
    if len(tensor_lists) != 4:
        raise TensorError(f"{OP}: {len(tensor_lists)} lists", "expected gradients, parameters and both moments", "")
    g, p, m, v = (list(x) for x in tensor_lists)
    if not p:
        return
    scalars = checked(OP, lr, (beta1, beta2), epsilon, weight_decay, mode == 1, bias_correction)
    steps = list(torch.full((len(p),), step - 1, dtype=torch.int64).unbind())
    update_(OP, make_step, (p, g, m, v), steps, scalars, noop_flag=noop_flag)


def multi_tensor_check_finite(noop_flag: Tensor, gradients: Sequence[Tensor]) -> None:
    """Set ``noop_flag`` to 1 where any gradient is infinite or NaN; never back to 0, and without waiting for the
    device.

    Args:
        noop_flag: int32 tensor of one element on the gradients' device. Mutated.
        gradients: float32, float16, bfloat16 or float64 on one device.

    Raises:
        TensorError, DtypeError: a gradient that is not contiguous, or of another device.
    """
    if noop_flag.dtype is not torch.int32 or noop_flag.numel() != 1:
        raise TensorError(
            f"{OP}: noop_flag is {noop_flag.dtype} {tuple(noop_flag.shape)}", "expected one int32 element", ""
        )
    for i, g in enumerate(gradients):
        if g.device != noop_flag.device:
            raise TensorError(f"{OP}: gradient {i} is on {g.device}", f"noop_flag is on {noop_flag.device}", "")
        if g.dtype not in FORMATS:
            raise DtypeError(f"{OP}: gradient {i} is {g.dtype}", "expected a floating point dtype of Adam's", "")
    if noop_flag.device.type == "cpu":
        if not all(bool(torch.isfinite(g).all()) for g in gradients):
            noop_flag.fill_(1)
        return
    launcher = launch.launcher(OP)
    ordinal = noop_flag.device.index or 0
    for dtype in {g.dtype for g in gradients}:
        same = [g for g in gradients if g.dtype is dtype and g.numel()]
        if not same:
            continue
        chunk = launch.chunk_elements("f64" if dtype is torch.float64 else "f32")  # what check_finite takes
        table = DeviceTable(OP, launcher.collect_addresses, [same], chunk, ("gradients",))
        columns = table_type(1)(chunks=table.chunks.data_ptr())
        columns.point(table.rows_for(0), table.n)
        columns.format[0] = table.formats[0]
        flag = ctypes.c_int64(noop_flag.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(ordinal)
        Launch(launcher, ordinal, "check_finite", BLOCK, columns, flag)(stream, table.blocks)
    updated_in_place([noop_flag])


def _fused_adam_(
    p: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    steps: list[Tensor],
    lr_tensor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
    noop_flag: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    scalars = checked(OP, lr, (beta1, beta2), eps, weight_decay, adamw, bias_correction)
    update_(OP, make_step, (p, g, m, v), steps, scalars, lr_tensor, Amp(grad_scale, found_inf), noop_flag)


def _fake(*_args: object) -> None:
    """Updates its arguments in place and returns nothing: no shape to infer."""


fused_adam_ = register(OP, "fused_adam_", {"CPU": _fused_adam_, "CUDA": _fused_adam_}, _fake)
