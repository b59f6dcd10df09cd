"""``FusedLion`` and ``DeepSpeedCPULion``: torch optimizers over the ops ``fused_lion`` and ``cpu_lion``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import cpu_lion, fused_lion
from deepspeed_ops.cpu_optimizer import CpuOptimizer
from deepspeed_ops.fused_optimizer import FusedOptimizer
from deepspeed_ops.lion_step import LionScalars, checked, make_step
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_optimizer import Step, TableOptimizer


class _Lion(TableOptimizer):
    """What both share: one moment, and the scalars of Lion."""

    moments = ("exp_avg",)

    def _make_step(self, lists: Sequence[list[Any]]) -> Step:
        return make_step(self.op, lists)

    def _check_scalars(self, group: Mapping[str, Any], lr: float) -> LionScalars:
        return checked(self.op, lr, group["betas"], group["weight_decay"])

    def _call_op(
        self, lists: list[list[Tensor]], steps: list[Tensor], scalars: LionScalars, lr: Tensor | None, amp: Amp
    ) -> None:
        s = scalars
        options = (s.lr, s.beta1, s.beta2, s.weight_decay)
        fused_lion.fused_lion_(*lists, steps, lr, *options, None, amp.grad_scale, amp.found_inf)


class FusedLion(_Lion, FusedOptimizer):
    """Lion with one launch per group and dtype on GPU tensors, and the same results on CPU tensors.

    Args:
        params: iterable of parameters or of group dicts; float32, float16, bfloat16 or (GPU) float64.
        lr: how far each element moves in a step; a float32 tensor on the GPU is read by the device at each step.
        betas: weight of the momentum in the direction, and its decay rate, in [0, 1).
        weight_decay: per step, times ``lr``.
        set_grad_none: :meth:`zero_grad` drops gradients instead of zeroing them.
        capturable: count steps on the device, so that a CUDA graph may hold a step.
        fixed_storage: as of :class:`deepspeed_ops.adam.FusedAdam`.

    State per parameter: ``step`` (int64) and ``exp_avg`` in the parameter's dtype.

    Raises:
        UsageError, DtypeError: a scalar of the wrong kind or outside its range.

    Source: Chen et al. 2023, algorithm 2; sign(0) = 0.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedLion([w], lr=0.1)
        >>> (w * torch.tensor([1.0, 0.0, -1.0])).sum().backward()
        >>> optimizer.step()
        >>> w.data
        tensor([0.9000, 1.0000, 1.1000])
    """

    op = "fused_lion"
    multi_tensor_lion = staticmethod(fused_lion.multi_tensor_lion)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        capturable: bool = False,
        fixed_storage: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none, capturable, fixed_storage)

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return p.dtype


class DeepSpeedCPULion(_Lion, CpuOptimizer):
    """Lion on CPU parameters, vectorised and multithreaded.

    Args:
        model_params: iterable of parameters or of group dicts; float32, float16 or bfloat16 on the CPU.
        lr, betas, weight_decay: as :class:`FusedLion`.
        fp32_optimizer_states: momentum in float32, else in the parameter's dtype.

    Raises:
        UsageError, DtypeError: a scalar of the wrong kind or outside its range.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = DeepSpeedCPULion([w], lr=0.1)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.data
        tensor([0.9000, 0.9000, 0.9000])
    """

    op = "cpu_lion"
    ds_opt_lion = cpu_lion
    instead = "use FusedLion, or p.cpu()"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, fp32_optimizer_states)

    def _kernel_side(self, lists: Sequence[list[Any]]) -> Step:
        return make_step(self.op, lists)
