"""``FusedAdam`` and ``DeepSpeedCPUAdam``: torch optimizers over the ops ``fused_adam`` and ``cpu_adam``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import cpu_adam, fused_adam
from deepspeed_ops.adam_scalars import AdamScalars, checked
from deepspeed_ops.adam_step import make_step
from deepspeed_ops.op_builder.errors import TensorError, UsageError
from deepspeed_ops.table_optimizer import Amp, Step, TableOptimizer


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


def _refuse_amsgrad(op: str, amsgrad: bool) -> None:
    if amsgrad:
        raise UsageError(
            f"{op}: amsgrad=True", "the kernels have no AMSGrad variant", "torch.optim.AdamW(amsgrad=True)"
        )


class FusedAdam(_Adam):
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
    own = ("_adamw", "adam_w_mode", "set_grad_none")
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
        _refuse_amsgrad(self.op, amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self._adamw = bool(adam_w_mode)
        super().__init__(params, defaults, capturable)
        for group in self.param_groups:
            group.setdefault("step", 0)
        self._fixed_storage = bool(fixed_storage)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return p.dtype

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them.

        Args:
            set_to_none: default: ``set_grad_none`` of the constructor.
        """
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Update every parameter that has a gradient. Mutates parameters and state.

        Args:
            closure: computes the loss anew; its value is returned.
            grads, output_params, scale, grad_norms: refused, as in DeepSpeed.
            kwargs: ``grad_scaler=None`` of DeepSpeed's signature; nothing else.

        Raises:
            TensorError, DtypeError: a parameter or gradient that cannot be used; nothing was changed then.
        """
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        for name, value in {**given, **kwargs}.items():
            if value is not None:
                raise UsageError(
                    f"fused_adam: step({name}=...)",
                    "the argument belongs to apex's old interface",
                    "set p.grad, then step()",
                )
        return self._step_with(closure)


class DeepSpeedCPUAdam(_Adam):
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
    own = ("_adamw", "adam_w_mode", "fp32_optimizer_states", "opt_id")
    ds_opt_adam = cpu_adam
    optimizer_id = 0

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
        _refuse_amsgrad(self.op, amsgrad)
        self.fp32_optimizer_states = fp32_optimizer_states
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self._adamw = bool(adamw_mode)
        super().__init__(model_params, defaults)
        self.opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self.adam_w_mode = adamw_mode

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else p.dtype

    def _make_step(self, lists: Sequence[list[Any]]) -> Step:
        device = lists[0][0].device
        if device.type != "cpu":
            raise TensorError(f"{self.op}: parameters are on {device}", "expected the CPU", "use FusedAdam, or p.cpu()")
        return super()._make_step(lists)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Mutates parameters and state.

        Args:
            closure: computes the loss anew; its value is returned.

        Raises:
            TensorError, DtypeError: a parameter or gradient that cannot be used; nothing was changed then.
        """
        return self._step_with(closure)
