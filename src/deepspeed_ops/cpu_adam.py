"""``cpu_adam``: Adam and AdamW on CPU tensors, under DeepSpeed's names and as ``torch.ops.deepspeed.cpu_adam_``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from deepspeed_ops import cpu_op
from deepspeed_ops.adam_scalars import checked
from deepspeed_ops.adam_step import CpuStep, fill_host, make_step
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import UsageError
from deepspeed_ops.registry import register
from deepspeed_ops.table_op import update_

OP = "cpu_adam"
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
    return cpu_op.simd_levels(OP)


def simd_level() -> str:
    """The level that a call uses now: the best one, or what ``DS_SIMD`` names.

    Raises:
        ValueError: ``DS_SIMD`` names a level that this CPU lacks.
    """
    return cpu_op.simd_level(OP)


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
        cpu_op.log.info("Adam optimizer %d uses %s", optimizer_id, simd_level())
        numbers = (alpha, betta1, betta2, weight_decay, adamw_mode)
        cpu_op.log.info("alpha=%g, betas=(%g, %g), weight_decay=%g, adamw=%s", *numbers)
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
    fill = _filled(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    cpu_op.update_one(CpuStep, step, fill, params, grads, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
    return 0


def adam_update_copy(
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
    low_precision_params: Tensor,
) -> int:
    """:func:`adam_update` of float32 parameters that also writes them, rounded, while they are in the cache.

    Args:
        low_precision_params: float16 or bfloat16 on the CPU (pinned, to send it on), shape of ``params``. Mutated.

    The other arguments and the errors are those of :func:`adam_update`.
    """
    fill = _filled(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    cpu_op.update_one(CpuStep, step, fill, params, grads, moments, low_precision_params)
    return 0


def adam_rollback(
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
    """Take one step of one tensor back, in place. DeepSpeed's name, order and return value (0).

    The inverse of :func:`adam_update` with the same arguments, up to rounding: what a half precision store has rounded
    away does not come back, and neither do values that became infinite or NaN. The moments before step 1, and a moment
    whose beta is 0, become 0.

    Args and Raises: as :func:`adam_update`; also a UsageError where ``lr * weight_decay`` is 1.
    """
    fill = _filled(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    if _modes[optimizer_id] and lr * weight_decay == 1.0:
        raise UsageError(f"{OP}: lr * weight_decay is 1", "the step forgot the parameters", "a smaller weight_decay")
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    cpu_op.update_one(CpuStep, step, fill, params, grads, moments, function="rollback_table")
    return 0


def _filled(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
) -> Callable[[Any], None]:
    """Check the scalars; what puts them into the library's arguments."""
    cpu_op.check_id(OP, _modes, optimizer_id, step)
    scalars = checked(OP, lr, (beta1, beta2), epsilon, weight_decay, _modes[optimizer_id], bias_correction)
    return lambda args: fill_host(args, scalars, scalars.lr)


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
    scalars = checked(OP, lr, (beta1, beta2), eps, weight_decay, adamw, bias_correction)
    update_(OP, make_step, (p, g, m, v), steps, scalars)


def _fake(*_args: object) -> None:
    """Updates its arguments in place and returns nothing: no shape to infer."""


cpu_adam_ = register(OP, "cpu_adam_", {"CPU": _cpu_adam_}, _fake)
