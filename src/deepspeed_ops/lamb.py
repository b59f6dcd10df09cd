"""``FusedLamb``: a torch optimizer over the op ``fused_lamb``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import fused_lamb
from deepspeed_ops.clip_grad_norm import global_norm
from deepspeed_ops.fused_optimizer import refuse_amsgrad
from deepspeed_ops.lamb_step import LambScalars, checked, make_step
from deepspeed_ops.op_builder.errors import UsageError
from deepspeed_ops.scalar_checks import not_negative
from deepspeed_ops.step_inputs import Amp, Given, per_group
from deepspeed_ops.table_optimizer import Bucket, Step, TableOptimizer


class FusedLamb(TableOptimizer):
    """LAMB with two passes over memory per group and dtype on GPU tensors; on CPU tensors in plain torch.

    Args:
        params: iterable of parameters or of group dicts; float32, float16, bfloat16 or float64.
        lr: learning rate per step; a float32 tensor on the GPU is read by the device at each step.
        bias_correction: step size ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the root of the second moment, or under it.
        eps_inside_sqrt: ``sqrt(v + eps)`` in place of ``sqrt(v) + eps``.
        weight_decay: times the parameter, part of the update whose norm is taken.
        max_grad_norm: if above 0, gradients are scaled so that their L2 norm over all groups is at most this.
        max_coeff, min_coeff: the trust ratio of a tensor is clamped to them.
        amsgrad: refused.
        capturable: count steps on the device, so that a CUDA graph may hold a step.
        fixed_storage: as of :class:`deepspeed_ops.adam.FusedAdam`.

    State per parameter: ``step`` (int64), ``exp_avg`` and ``exp_avg_sq`` in the parameter's dtype.

    Raises:
        UsageError, DtypeError: a scalar of the wrong kind or outside its range, or ``amsgrad``.

    Source: You et al. 2020, algorithm 2. A NaN in one element's gradient reaches the whole tensor through its norm.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = FusedLamb([w], lr=0.1, bias_correction=False)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.data, optimizer.get_lamb_coeffs()
        (tensor([0.9000, 0.9000, 0.9000, 0.9000]), [0.316...])
    """

    op = "fused_lamb"
    moments = ("exp_avg", "exp_avg_sq")
    own = ("eps_mode",)
    fused_lamb_cuda = fused_lamb

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        fixed_storage: bool = False,
    ) -> None:
        refuse_amsgrad(self.op, amsgrad, "leave it out")
        self.eps_mode = 0 if eps_inside_sqrt else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults, capturable)
        self._fixed_storage = bool(fixed_storage)

    def _prepare(self) -> None:
        super()._prepare()
        self._last: list[tuple[int, list[int], Tensor, Tensor]] = []  # group, positions, which of them, ratios

    # --- what the base asks ---

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return p.dtype

    def _make_step(self, lists: Sequence[list[Any]]) -> Step:
        return make_step(self.op, lists)

    def _check_scalars(self, group: Mapping[str, Any], lr: float) -> LambScalars:
        not_negative(self.op, "max_grad_norm", group["max_grad_norm"])
        options = (group["eps"], group["weight_decay"], group["max_coeff"], group["min_coeff"])
        return checked(self.op, lr, group["betas"], *options, self.eps_mode == 0, group["bias_correction"])

    def _call_op(
        self, lists: list[list[Tensor]], steps: list[Tensor], scalars: LambScalars, lr: Tensor | None, amp: Amp
    ) -> None:
        s = scalars
        options = (s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.max_coeff, s.min_coeff)
        flags = (s.eps_inside_sqrt, s.bias_correction)
        ratios = fused_lamb.fused_lamb_(*lists, steps, lr, *options, *flags, None, amp.grad_scale, amp.found_inf)
        count = len(lists[0])
        group = self._last[-1][0] + 1 if self._last else 0
        self._last.append((group, list(range(count)), torch.ones(count, dtype=torch.bool), ratios))

    def _launch(self, bucket: Bucket, moved: int, scalars: Any, lr: Tensor | None, amp: Amp) -> None:
        super()._launch(bucket, moved, scalars, lr, amp)
        step: Any = bucket.step
        self._last.append((bucket.group, bucket.part, step.table.present, step.ratios))

    def _amps(self, amp: Amp, given: Given, gradients: Sequence[list[Any]]) -> list[Amp]:
        first = next((g for some in gradients for g in some if g is not None), None)
        if first is None:
            return [amp] * len(gradients)
        scale = None if given.scale == 1.0 else _number_on(given.scale, first.device)
        if amp.grad_scale is not None:
            other = _number_on(amp.grad_scale, first.device)
            scale = other if scale is None else scale * other
        limits = [float(group["max_grad_norm"]) for group in self.param_groups]
        norms: list[Tensor | None]
        if any(limits) and given.norms is None:
            norms = [global_norm([g for some in gradients for g in some if g is not None])] * len(limits)
        else:
            norms = [None if x is None else _number_on(x, first.device) for x in given.norms or [None] * len(limits)]
        return [Amp(_clipped(scale, *x), amp.found_inf) for x in zip(norms, limits, strict=True)]

    # --- stepping ---

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Update every parameter that has a gradient. Mutates parameters and state.

        Args:
            closure: computes the loss anew; its value is returned.
            grads: gradients in place of the parameters' own: a list for each group, or one list or generator for a
                single group; of any floating point dtype that the kernel reads.
            output_params: tensors that get the new parameters in their own dtype; grouped as ``grads``. Mutated.
            scale: gradients are divided by it.
            grad_norms: norm of each group's gradients as they are (not divided by ``scale``), in place of the norm over
                all groups that is computed where ``max_grad_norm`` is above 0.

        Raises:
            TensorError, DtypeError, UsageError: an argument that cannot be used; nothing was changed then.
        """
        groups = len(self.param_groups)
        norms = None if grad_norms is None else list(grad_norms)
        if norms is not None and len(norms) != groups:
            raise UsageError(f"{self.op}: {len(norms)} grad_norms", f"there are {groups} groups", "one norm each")
        divisor = not_negative(self.op, "scale", scale)
        if divisor == 0.0:
            raise UsageError(f"{self.op}: scale is 0", "gradients are divided by it", "scale=1.0")
        given = Given(
            per_group(self.op, "grads", grads, groups),
            per_group(self.op, "output_params", output_params, groups),
            divisor,
            norms,
        )
        self._last = []
        return self._step_with(closure, given)

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the tensors that the last step updated, in the order of groups and parameters.

        Waits for the GPU. After a replayed graph: those of the replay.
        """
        rows = [
            (group, position, ratio)
            for group, part, present, ratios in self._last
            for position, here, ratio in zip(part, present.tolist(), ratios.tolist(), strict=True)
            if here
        ]
        return [ratio for _, _, ratio in sorted(rows, key=lambda row: row[:2])]


def _number_on(x: Any, device: torch.device) -> Tensor:
    """A number or a tensor of one element as a float32 tensor of no dimension on a device."""
    if isinstance(x, Tensor):
        return x.reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)
    return torch.full((), float(x), dtype=torch.float32, device=device)


def _clipped(scale: Tensor | None, norm: Tensor | None, limit: float) -> Tensor | None:
    """What gradients are divided by so that their norm, once divided by ``scale``, is at most ``limit``."""
    if norm is None or limit == 0.0:
        return scale
    scale = torch.ones((), dtype=torch.float32, device=norm.device) if scale is None else scale
    return scale * ((norm.to(torch.float32) / scale + 1e-6) / limit).clamp(min=1.0)
