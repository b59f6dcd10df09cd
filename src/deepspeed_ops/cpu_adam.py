"""``cpu_adam``: Adam and AdamW on CPU tensors, under DeepSpeed's names and as ``torch.ops.deepspeed.cpu_adam_``."""

from __future__ import annotations

import ctypes
import logging
import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from deepspeed_ops.adam_op import adam_
from deepspeed_ops.adam_scalars import checked
from deepspeed_ops.adam_step import CpuStepArgs, simd_request
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.registry import register, updated_in_place
from deepspeed_ops.tensor_checks import FORMATS, check_updated, is_plain, laid_out_like

OP = "cpu_adam"
log = logging.getLogger("deepspeed_ops")
_modes: dict[int, bool] = {}  # optimizer id: AdamW


def module() -> ModuleType:
    """What ``CPUAdamBuilder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module(OP)
    return sys.modules[__name__]


def simd_levels() -> tuple[str, ...]:
    """SIMD levels that the library holds and this CPU has, best first."""
    return tuple(str(loader.host_module(OP).simd_levels()).split(","))


def simd_level() -> str:
    """The level that a call uses now: the best one, or what ``DS_SIMD`` names.

    Raises:
        ValueError: ``DS_SIMD`` names a level that this CPU lacks.
    """
    return str(loader.host_module(OP).simd_level(simd_request()))


def create_adam(
    optimizer_id: int,
    alpha: float,
    betta1: float,
    betta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    should_log: bool,
) -> int:
    """Register an optimizer under an id of the caller's choice. DeepSpeed's name, order and return value (0).

    Args:
        optimizer_id: names the optimizer in :func:`adam_update`.
        alpha, betta1, betta2, eps, weight_decay: checked here; each update brings its own.
        adamw_mode: decoupled weight decay (AdamW), else L2.
        should_log: log the SIMD level and the configuration.
    """
    checked(OP, alpha, (betta1, betta2), eps, weight_decay, adamw_mode, True)
    _modes[optimizer_id] = bool(adamw_mode)
    if should_log:
        log.info("Adam optimizer %d uses %s", optimizer_id, simd_level())
        log.info("alpha=%g, betas=(%g, %g), weight_decay=%g, adamw=%s", alpha, betta1, betta2, weight_decay, adamw_mode)
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Forget an optimizer; an unknown id is no error. Returns 0."""
    _modes.pop(optimizer_id, None)
    return 0


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """One step of one tensor, in place. DeepSpeed's name, order and return value (0).

    Args:
        optimizer_id: from :func:`create_adam`.
        step: 1-based number of this step; bias correction is exact at any value, in any order.
        lr, beta1, beta2, epsilon, weight_decay, bias_correction: scalars of the step.
        params: float32, float16 or bfloat16 on the CPU, contiguous. Mutated.
        grads: shape of ``params``; float32 or the dtype of ``params`` (any of the three for float32 parameters).
        exp_avg, exp_avg_sq: shape of ``params``, contiguous; float32 or the dtype of ``params``. Mutated.

    Raises:
        UsageError: an unknown id, a step below 1, or a scalar outside its range.
        TensorError, DtypeError: a tensor that cannot be updated in place, or dtypes that do not go together.
    """
    if optimizer_id not in _modes:
        raise UsageError(
            f"{OP}: optimizer id {optimizer_id} is unknown", "create_adam was not called for it", "create_adam(...)"
        )
    if step < 1:
        raise UsageError(f"{OP}: step is {step}", "the first step is 1", "step=1")
    scalars = checked(OP, lr, (beta1, beta2), epsilon, weight_decay, _modes[optimizer_id], bias_correction)
    tensors = _checked_tensors(params, grads, exp_avg, exp_avg_sq)
    columns = (ctypes.c_int64 * 5)(*(x.data_ptr() for x in tensors), params.numel())
    counter = ctypes.c_int64(step)
    args = CpuStepArgs(
        ctypes.addressof(columns), ctypes.addressof(counter), 1, *(FORMATS[x.dtype] for x in tensors[:3])
    )
    args.lr, args.beta1, args.beta2, args.eps = scalars.lr, scalars.beta1, scalars.beta2, scalars.eps
    args.weight_decay, args.grad_scale, args.threads = scalars.weight_decay, 1.0, torch.get_num_threads()
    args.adamw, args.bias_correction = scalars.adamw, scalars.bias_correction
    loader.host_module(OP).step_table(ctypes.addressof(args), simd_request())
    updated_in_place([params, exp_avg, exp_avg_sq])
    return 0


def _checked_tensors(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    for name, x in (("params", p), ("grads", g), ("exp_avg", m), ("exp_avg_sq", v)):
        if not is_plain(x) or x.device.type != "cpu":
            raise TensorError(
                f"{OP}: {name} is a {type(x).__name__} on {x.device}", "expected a CPU tensor", f"{name}.cpu()"
            )
        if x.dtype not in FORMATS or x.dtype is torch.float64:
            raise DtypeError(f"{OP}: {name} is {x.dtype}", "expected float32, float16 or bfloat16", "")
        if name != "grads":
            check_updated(OP, name, 0, x)
        if name.startswith("exp") and (x.shape != p.shape or x.stride() != p.stride()):
            raise TensorError(
                f"{OP}: {name} has shape {tuple(x.shape)}", f"params has {tuple(p.shape)}, or other strides", ""
            )
    if m.dtype != v.dtype:
        raise DtypeError(f"{OP}: exp_avg is {m.dtype} and exp_avg_sq {v.dtype}", "expected one dtype", "")
    updated = (("params", p), ("exp_avg", m), ("exp_avg_sq", v))
    runs = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, name) for name, x in updated if x.numel())
    for (_, end, first), (begin, _, second) in pairwise(runs):
        if begin < end:
            raise TensorError(f"{OP}: {first} and {second} overlap in memory", "each is updated in place", "")
    return p, laid_out_like(OP, 0, g, p), m, v


def _cpu_adam_(
    p: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
) -> None:
    adam_(OP, (p, g, m, v), steps, checked(OP, lr, (beta1, beta2), eps, weight_decay, adamw, bias_correction))


def _fake(*_args: object) -> None:
    """Updates its arguments in place and returns nothing: no shape to infer."""


cpu_adam_ = register(OP, "cpu_adam_", {"CPU": _cpu_adam_}, _fake)
