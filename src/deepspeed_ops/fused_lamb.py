"""``fused_lamb``: LAMB on many GPU tensors in two passes, under DeepSpeed's name and as
``torch.ops.deepspeed.fused_lamb_``. On CPU tensors it does the same in plain torch."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor

from deepspeed_ops import launch
from deepspeed_ops.lamb_step import checked, make_step
from deepspeed_ops.op_builder.errors import UsageError
from deepspeed_ops.registry import register
from deepspeed_ops.scalar_checks import not_negative
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_op import update_

OP = "fused_lamb"


def module() -> ModuleType:
    """What ``FusedLambBuilder().load()`` returns: this module, ready to launch.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    launch.launcher(OP)
    return sys.modules[__name__]


def lamb(
    p: Tensor,
    p_copy: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    max_coeff: float,
    min_coeff: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> Tensor:
    """One step of one tensor, in place. DeepSpeed's name and order.

    Args:
        p: parameters. Mutated.
        p_copy: gets the new parameters in its own dtype; an empty tensor: no copy. Mutated.
        m, v: moments, shape of ``p``. Mutated.
        g: gradient; float32, float16 or bfloat16 for parameters that are not float64.
        lr, beta1, beta2, eps, decay: scalars of the step.
        max_coeff, min_coeff: the trust ratio is clamped to them.
        grad_scale: the gradient is divided by it.
        step: 1-based number of this step.
        mode: 0 for ``sqrt(v + eps)``, 1 for ``sqrt(v) + eps``.
        bias_correction: 0 or 1.

    Returns:
        The trust ratio: float32 ``[1]`` on the device of ``p``.

    Raises:
        UsageError: a mode or a scalar outside its range.
        TensorError, DtypeError: tensors that no kernel takes.
    """
    if mode not in (0, 1):
        raise UsageError(f"{OP}: mode is {mode!r}", "expected 0 (eps inside the root) or 1 (outside)", "mode=1")
    if step < 1:
        raise UsageError(f"{OP}: step is {step}", "the first step is 1", "step=1")
    scalars = checked(OP, lr, (beta1, beta2), eps, decay, max_coeff, min_coeff, mode == 0, bias_correction)
    scale = not_negative(OP, "scale", grad_scale)
    amp = Amp() if scale == 1.0 else Amp(torch.full((), scale, dtype=torch.float32, device=p.device))
    lists = [[p], [g], [m], [v], *([[p_copy]] if p_copy.numel() else [])]
    ((_, done),) = update_(OP, make_step, lists, [torch.tensor(step - 1)], scalars, amp=amp)
    return done.ratios.clone()  # type: ignore[no-any-return]


def _fused_lamb_(
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
    max_coeff: float,
    min_coeff: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    noop_flag: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> Tensor:
    options = (eps, weight_decay, max_coeff, min_coeff, eps_inside_sqrt, bias_correction)
    scalars = checked(OP, lr, (beta1, beta2), *options)
    amp = Amp(grad_scale, found_inf)
    ratios = torch.ones(len(p), dtype=torch.float32, device=p[0].device)
    for part, step in update_(OP, make_step, (p, g, m, v), steps, scalars, lr_tensor, amp, noop_flag):
        if part == list(range(part[0], part[-1] + 1)):  # no index to upload, so that a capture may hold it
            ratios[part[0] : part[-1] + 1] = step.ratios
        else:
            ratios[torch.tensor(part, device=ratios.device)] = step.ratios
    return ratios


def _fake(p: list[Tensor], *_args: object) -> Tensor:
    return p[0].new_empty(len(p), dtype=torch.float32)


fused_lamb_ = register(OP, "fused_lamb_", {"CPU": _fused_lamb_, "CUDA": _fused_lamb_}, _fake)
