"""``FusedAdam`` and ``DeepSpeedCPUAdam``: torch optimizers over the ops ``fused_adam`` and ``cpu_adam``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import cpu_adam, cpu_op, fused_adam
from deepspeed_ops.adam_scalars import AdamScalars, checked
from deepspeed_ops.adam_step import CpuStep, fill_host, make_step
from deepspeed_ops.cpu_optimizer import CpuOptimizer
from deepspeed_ops.fused_optimizer import FusedOptimizer, refuse_amsgrad
from deepspeed_ops.op_builder.errors import UsageError
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_optimizer import Step, TableOptimizer


class _Adam(TableOptimizer):
    """What both share: two moments, and the scalars of Adam."""

    moments = ("exp_avg", "exp_avg_sq")
    _adamw = True

    def _make_step(self, lists: Sequence[list[Any]]) -> Step:
        return make_step(self.op, lists)

    def _check_scalars(self, group: Mapping[str, Any], lr: float) -> AdamScalars:
        options = (group["betas"], group["eps"], group["weight_decay"])
        return checked(self.op, lr, *options, self._adamw, group["bias_correction"])

    def _call_op(
        self, lists: list[list[Tensor]], steps: list[Tensor], scalars: AdamScalars, lr: Tensor | None, amp: Amp
    ) -> None:
        s = scalars
        options = (s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.adamw, s.bias_correction)
        fused_adam.fused_adam_(*lists, steps, lr, *options, None, amp.grad_scale, amp.found_inf)


class FusedAdam(_Adam, FusedOptimizer):
    """Adam and AdamW with one launch per group and dtype on GPU tensors, and the same results on CPU tensors.

    Args:
        params: iterable of parameters or of group dicts; float32, float16, bfloat16 or (GPU) float64.
        lr: learning rate per step; a float32 tensor on the GPU is read by the device at each step.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment.
        adam_w_mode: decoupled weight decay (AdamW), else L2.
        weight_decay: per step, times ``lr`` with AdamW.
        amsgrad: refused.
        set_grad_none: :meth:`zero_grad` drops gradients instead of zeroing them.
        capturable: count steps on the device, so that a CUDA graph may hold a step.
        fixed_storage: your promise that parameters and state keep their memory between steps (no ``.data`` swaps, no
            offload, no resharding) and that no graph from before a step is used after it. Then only gradients are
            looked at, which halves the host's time of a step over thousands of tensors; a broken promise corrupts
            memory.

    State per parameter: ``step`` (int64), ``exp_avg`` and ``exp_avg_sq`` in the parameter's dtype.

    Raises:
        UsageError, DtypeError: a scalar of the wrong kind or outside its range, or ``amsgrad``.

    Source: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = FusedAdam([w], lr=0.1)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.data
        tensor([0.9000, 0.9000, 0.9000])
    """

    op = "fused_adam"
    own = (*FusedOptimizer.own, "_adamw", "adam_w_mode")
    multi_tensor_adam = staticmethod(fused_adam.multi_tensor_adam)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        capturable: bool = False,
        fixed_storage: bool = False,
    ) -> None:
        refuse_amsgrad(self.op, amsgrad, "torch.optim.AdamW(amsgrad=True)")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self._adamw = bool(adam_w_mode)
        super().__init__(params, defaults, set_grad_none, capturable, fixed_storage)
        self.adam_w_mode = 1 if adam_w_mode else 0

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return p.dtype


class DeepSpeedCPUAdam(_Adam, CpuOptimizer):
    """Adam and AdamW on CPU parameters, vectorised and multithreaded.

    Args:
        model_params: iterable of parameters or of group dicts; float32, float16 or bfloat16 on the CPU.
        lr, bias_correction, betas, eps, weight_decay: as :class:`FusedAdam`.
        amsgrad: refused (DeepSpeed's takes it and does not apply it).
        adamw_mode: decoupled weight decay (AdamW), else L2.
        fp32_optimizer_states: moments in float32, else in the parameter's dtype.

    Raises:
        UsageError, DtypeError: a scalar of the wrong kind or outside its range, or ``amsgrad``.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = DeepSpeedCPUAdam([w], lr=0.1)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.data
        tensor([0.9000, 0.9000, 0.9000])
    """

    op = "cpu_adam"
    own = (*CpuOptimizer.own, "_adamw", "adam_w_mode")
    ds_opt_adam = cpu_adam
    instead = "use FusedAdam, or p.cpu()"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_amsgrad(self.op, amsgrad, "torch.optim.AdamW(amsgrad=True)")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self._adamw = bool(adamw_mode)
        super().__init__(model_params, defaults, fp32_optimizer_states)
        self.adam_w_mode = adamw_mode

    def _kernel_side(self, lists: Sequence[list[Any]]) -> Step:
        return make_step(self.op, lists)

    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update the one parameter that has a gradient, with state kept under a number. Mutates both.

        For engines that swap pieces of a model through a few parameters: the state belongs to the piece, not to the
        parameter that holds it at the moment.

        Args:
            subgroup_id: key of the state in ``self.state``; made at the first step.
            closure: computes the loss anew; its value is returned.

        Raises:
            UsageError: more than one parameter has a gradient.
            TensorError, DtypeError: a tensor that cannot be used; nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = self._one_with_gradient()
        if found is not None:
            group, p = found
            state = self._numbered[subgroup_id]
            if not len(state):
                state["step"] = 0
                for key in self.moments:
                    state[key] = torch.zeros_like(p, dtype=self._state_dtype(p), memory_format=torch.preserve_format)
            self._subgroup("step_table", state["step"] + 1, group, p, state)
            state["step"] += 1
        return loss

    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Take the last :meth:`step_subgroup` back; the parameter must hold what it had then. Mutates both.

        What ``deepspeed_ops.cpu_adam.adam_rollback`` says of rounding holds here.

        Args:
            sub_group_id: as given to :meth:`step_subgroup`.
            closure: computes the loss anew; its value is returned.

        Raises:
            UsageError: the sub-group was never stepped, or has no step left.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._numbered.get(sub_group_id)
        if not state:
            raise UsageError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not been initialized.",
                "no step_subgroup was made for it",
                f"optimizer.step_subgroup({sub_group_id})",
            )
        if state["step"] <= 0:
            raise UsageError(
                f"Cannot rollback sub_group_id {sub_group_id}: step count is {state['step']}",
                "every step of it was taken back",
                f"optimizer.step_subgroup({sub_group_id})",
            )
        found = self._one_with_gradient()
        if found is not None:
            self._subgroup("rollback_table", state["step"], *found, state)
            state["step"] -= 1
        return loss

    @property
    def _numbered(self) -> dict[Any, Any]:
        """The state, whose keys are parameters and numbers of sub-groups."""
        return self.state

    def _one_with_gradient(self) -> tuple[dict[str, Any], Tensor] | None:
        found = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len(found) > 1:
            raise UsageError(
                f"{self.op}: {len(found)} parameters have a gradient", "a sub-group is one parameter", "step()"
            )
        return found[0] if found else None

    @torch.no_grad()
    def _subgroup(self, function: str, step: int, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        scalars, _ = self._scalars(group)
        moments = {key: state[key] for key in self.moments}
        fill = lambda args: fill_host(args, scalars, scalars.lr)  # noqa: E731
        if p.grad is not None:
            cpu_op.update_one(CpuStep, step, fill, p.detach(), p.grad, moments, function=function)
