"""``cpu_adagrad``: Adagrad on CPU tensors, under DeepSpeed's names and as ``torch.ops.deepspeed.cpu_adagrad_``."""

from __future__ import annotations

import sys
from types import ModuleType

from torch import Tensor

from deepspeed_ops import cpu_op
from deepspeed_ops.adagrad_step import CpuAdagradStep, checked, fill_host, make_step
from deepspeed_ops.op_builder import loader
from deepspeed_ops.registry import register
from deepspeed_ops.table_op import update_

OP = "cpu_adagrad"
_created: set[int] = set()


def module() -> ModuleType:
    """What ``CPUAdagradBuilder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module(OP)
    return sys.modules[__name__]


def create_adagrad(optimizer_id: int, alpha: float, eps: float, weight_decay: float, should_log: bool) -> int:
    """Register an optimizer under an id of the caller's choice. DeepSpeed's name, order and return value (0).

    Args:
        optimizer_id: names the optimizer in :func:`adagrad_update`.
        alpha, eps, weight_decay: checked here; each update brings its own.
        should_log: log the SIMD level and the configuration.
    """
    checked(OP, alpha, eps, weight_decay)
    _created.add(optimizer_id)
    if should_log:
        cpu_op.log.info("Adagrad optimizer %d uses %s", optimizer_id, cpu_op.simd_level(OP))
        cpu_op.log.info("alpha=%g, eps=%g, weight_decay=%g", alpha, eps, weight_decay)
    return 0


def destroy_adagrad(optimizer_id: int) -> int:
    """Forget an optimizer; an unknown id is no error. Returns 0."""
    _created.discard(optimizer_id)
    return 0


def adagrad_update(
    optimizer_id: int,
    step: int,
    lr: float,
    epsilon: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """One step of one tensor, in place. DeepSpeed's name, order and return value (0).

    Args:
        optimizer_id: from :func:`create_adagrad`.
        step: 1-based number of this step; the formula does not use it.
        lr, epsilon, weight_decay: scalars of the step.
        params: float32, float16 or bfloat16 on the CPU, contiguous. Mutated.
        grads: shape of ``params``; float32 or the dtype of ``params`` (any of the three for float32 parameters). Not
            mutated.
        exp_avg_sq: sums of squares: shape of ``params``, contiguous; float32 or the dtype of ``params``. Mutated.

    Raises:
        UsageError: an unknown id, a step below 1, or a scalar outside its range.
        TensorError, DtypeError: a tensor that cannot be updated in place, or dtypes that do not go together.
    """
    cpu_op.check_id(OP, _created, optimizer_id, step)
    s = checked(OP, lr, epsilon, weight_decay)
    fill = lambda args: fill_host(args, s, s.lr)  # noqa: E731
    cpu_op.update_one(CpuAdagradStep, step, fill, params, grads, {"exp_avg_sq": exp_avg_sq})
    return 0


def _cpu_adagrad_(
    p: list[Tensor],
    g: list[Tensor],
    v: list[Tensor],
    steps: list[Tensor],
    lr: float,
    eps: float,
    weight_decay: float,
) -> None:
    update_(OP, make_step, (p, g, v), steps, checked(OP, lr, eps, weight_decay))


def _fake(*_args: object) -> None:
    """Updates its arguments in place and returns nothing: no shape to infer."""


cpu_adagrad_ = register(OP, "cpu_adagrad_", {"CPU": _cpu_adagrad_}, _fake)
