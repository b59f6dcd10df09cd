"""``cpu_lion``: Lion on CPU tensors, under DeepSpeed's names and as ``torch.ops.deepspeed.cpu_lion_``."""

from __future__ import annotations

import sys
from types import ModuleType

from torch import Tensor

from deepspeed_ops import cpu_op
from deepspeed_ops.lion_step import CpuLionStep, checked, fill_host, make_step
from deepspeed_ops.op_builder import loader
from deepspeed_ops.registry import register
from deepspeed_ops.table_op import update_

OP = "cpu_lion"
_created: set[int] = set()


def module() -> ModuleType:
    """What ``CPULionBuilder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module(OP)
    return sys.modules[__name__]


def create_lion(
    optimizer_id: int, alpha: float, betta1: float, betta2: float, weight_decay: float, should_log: bool
) -> int:
    """Register an optimizer under an id of the caller's choice. DeepSpeed's name, order and return value (0).

    Args:
        optimizer_id: names the optimizer in :func:`lion_update`.
        alpha, betta1, betta2, weight_decay: checked here; each update brings its own.
        should_log: log the SIMD level and the configuration.
    """
    checked(OP, alpha, (betta1, betta2), weight_decay)
    _created.add(optimizer_id)
    if should_log:
        cpu_op.log.info("Lion optimizer %d uses %s", optimizer_id, cpu_op.simd_level(OP))
        cpu_op.log.info("alpha=%g, betas=(%g, %g), weight_decay=%g", alpha, betta1, betta2, weight_decay)
    return 0


def destroy_lion(optimizer_id: int) -> int:
    """Forget an optimizer; an unknown id is no error. Returns 0."""
    _created.discard(optimizer_id)
    return 0


def lion_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
) -> int:
    """One step of one tensor, in place. DeepSpeed's name, order and return value (0).

    Args:
        optimizer_id: from :func:`create_lion`.
        step: 1-based number of this step; the formula does not use it.
        lr, beta1, beta2, weight_decay: scalars of the step.
        params: float32, float16 or bfloat16 on the CPU, contiguous. Mutated.
        grads: shape of ``params``; float32 or the dtype of ``params`` (any of the three for float32 parameters).
        exp_avg: shape of ``params``, contiguous; float32 or the dtype of ``params``. Mutated.

    Raises:
        UsageError: an unknown id, a step below 1, or a scalar outside its range.
        TensorError, DtypeError: a tensor that cannot be updated in place, or dtypes that do not go together.
    """
    cpu_op.check_id(OP, _created, optimizer_id, step)
    s = checked(OP, lr, (beta1, beta2), weight_decay)
    cpu_op.update_one(CpuLionStep, step, lambda a: fill_host(a, s, s.lr), params, grads, {"exp_avg": exp_avg})
    return 0


def _cpu_lion_(
    p: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    update_(OP, make_step, (p, g, m), steps, checked(OP, lr, (beta1, beta2), weight_decay))


def _fake(*_args: object) -> None:
    """Updates its arguments in place and returns nothing: no shape to infer."""


cpu_lion_ = register(OP, "cpu_lion_", {"CPU": _cpu_lion_}, _fake)
