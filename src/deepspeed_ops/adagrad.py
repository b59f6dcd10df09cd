"""``DeepSpeedCPUAdagrad``: a torch optimizer over the op ``cpu_adagrad``, for dense and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import cpu_adagrad
from deepspeed_ops.adagrad_step import AdagradScalars, SparseRows, checked, make_step
from deepspeed_ops.cpu_optimizer import CpuOptimizer
from deepspeed_ops.fused_optimizer import refuse_amsgrad
from deepspeed_ops.registry import updated_in_place
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_optimizer import Step, Work


class DeepSpeedCPUAdagrad(CpuOptimizer):
    """Adagrad on CPU parameters, vectorised and multithreaded. Gradients are read, never written.

    Args:
        model_params: iterable of parameters or of group dicts; float32, float16 or bfloat16 on the CPU.
        lr: learning rate per step.
        eps: added to the root of the sum of squares.
        weight_decay: times the parameter, added to the gradient (L2, as torch's Adagrad). With a sparse gradient only
            the rows it names decay, in the step that names them.
        amsgrad: refused (DeepSpeed's takes it and does not apply it).
        fp32_optimizer_states: sums of squares in float32, else in the parameter's dtype.

    State per parameter: ``step`` (int64) and ``exp_avg_sq``.

    Raises:
        UsageError, DtypeError: a scalar of the wrong kind or outside its range, or ``amsgrad``.

    Source: Duchi et al. 2011, diagonal case.

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(4, 2, sparse=True)
        >>> optimizer = DeepSpeedCPUAdagrad(table.parameters(), lr=0.1)
        >>> before = table.weight.detach().clone()
        >>> table(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.step()
        >>> (table.weight.detach() - before).round(decimals=4)[:2].abs()
        tensor([[0.0000, 0.0000],
                [0.1000, 0.1000]])
    """

    op = "cpu_adagrad"
    moments = ("exp_avg_sq",)
    ds_opt_adagrad = cpu_adagrad
    instead = "use torch.optim.Adagrad, or p.cpu()"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_amsgrad(self.op, amsgrad, "leave it out: Adagrad's sum of squares never falls")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, fp32_optimizer_states)

    def _kernel_side(self, lists: Sequence[list[Any]]) -> Step:
        return make_step(self.op, lists)

    def _check_scalars(self, group: Mapping[str, Any], lr: float) -> AdagradScalars:
        return checked(self.op, lr, group["eps"], group["weight_decay"])

    def _call_op(
        self, lists: list[list[Tensor]], steps: list[Tensor], scalars: AdagradScalars, lr: Tensor | None, amp: Amp
    ) -> None:
        if amp.found_inf is not None and float(amp.found_inf):
            return
        if amp.grad_scale is not None:
            lists = [lists[0], [g / amp.grad_scale.to(g.dtype) for g in lists[1]], lists[2]]
        cpu_adagrad.cpu_adagrad_(*lists, steps, scalars.lr, scalars.eps, scalars.weight_decay)

    # --- sparse gradients ---

    def _look(self, index: int, group: dict[str, Any], work: Work, amp: Amp, eager: bool) -> list[Callable[[], None]]:
        params, gradients, copies = work
        sparse = [i for i, g in enumerate(gradients) if g is not None and g.layout is not torch.strided]
        if not sparse:
            return super()._look(index, group, work, amp, eager)
        rows = []
        for i in sparse:
            p = params[i]
            self._init_state(p)
            rows.append(SparseRows(self.op, p.detach(), gradients[i], self._tracked.of(p)["exp_avg_sq"]))
        scalars, lr = self._scalars(group)
        dense = [None if i in sparse else g for i, g in enumerate(gradients)]
        launches = super()._look(index, group, (params, dense, copies), amp, eager)
        rate = scalars.lr if lr is None else float(lr)
        for i, some in zip(sparse, rows, strict=True):
            copy = None if copies is None else copies[i]
            launches.append(partial(self._launch_rows, params[i], some, copy, scalars, rate, amp))
        return launches

    def _launch_rows(
        self, p: Tensor, rows: SparseRows, copy: Tensor | None, scalars: AdagradScalars, lr: float, amp: Amp
    ) -> None:
        if amp.found_inf is not None and float(amp.found_inf):
            return
        state = self._tracked.of(p)
        if isinstance(state["step"], Tensor):
            state["step"].add_(1)
        else:
            state.quietly("step", state["step"] + 1)
        rows.launch(scalars, lr, 1.0 if amp.grad_scale is None else float(amp.grad_scale))
        updated_in_place([p])
        if copy is not None:
            copy.copy_(p)
