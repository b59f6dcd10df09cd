"""What the optimizers for CPU parameters share under DeepSpeed's names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import TensorError
from deepspeed_ops.step_inputs import Given, per_group
from deepspeed_ops.table_optimizer import Step, TableOptimizer


class CpuOptimizer(TableOptimizer):
    """Base class of DeepSpeedCPUAdam, DeepSpeedCPUAdagrad and DeepSpeedCPULion.

    Args:
        model_params: iterable of parameters or of group dicts.
        defaults: options of a group.
        fp32_optimizer_states: moments in float32, else in the parameter's dtype.
    """

    own: ClassVar[tuple[str, ...]] = ("fp32_optimizer_states", "opt_id")
    instead: ClassVar[str]  # for parameters on a GPU
    optimizer_id: ClassVar[int] = 0

    def __init__(self, model_params: Any, defaults: dict[str, Any], fp32_optimizer_states: bool) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, defaults)
        self.opt_id = type(self).optimizer_id
        type(self).optimizer_id += 1

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else p.dtype

    @abstractmethod
    def _kernel_side(self, lists: Sequence[list[Any]]) -> Step:
        """The kernel side for p, g and the moments, which share dtypes, on the CPU."""

    def _make_step(self, lists: Sequence[list[Any]]) -> Step:
        device = lists[0][0].device
        if device.type != "cpu":
            raise TensorError(f"{self.op}: parameters are on {device}", "expected the CPU", self.instead)
        return self._kernel_side(lists)

    def step(self, closure: Callable[[], Any] | None = None, fp16_param_groups: Any = None) -> Any:
        """Update every parameter that has a gradient. Mutates parameters and state.

        Args:
            closure: computes the loss anew; its value is returned.
            fp16_param_groups: float16 or bfloat16 tensors on the CPU that get the new values of the float32 parameters
                while those are in the cache: a list for each group (or one list for a single group), None where a
                parameter has none. Mutated.

        Raises:
            TensorError, DtypeError: a parameter or gradient that cannot be used; nothing was changed then.
        """
        copies = per_group(self.op, "fp16_param_groups", fp16_param_groups, len(self.param_groups))
        if copies is not None:
            self._check_copies(copies)
        return self._step_with(closure, Given(copies=copies))

    def _check_copies(self, copies: Sequence[list[Any]]) -> None:
        for group, some in zip(self.param_groups, copies, strict=True):
            for i, (p, copy) in enumerate(zip(group["params"], some, strict=False)):
                if copy is None:
                    continue
                if copy.device.type != "cpu" or copy.shape != p.shape:
                    found = f"{tuple(copy.shape)} on {copy.device}"
                    fix = "a pinned CPU tensor, then gpu.copy_(pinned, non_blocking=True)"
                    raise TensorError(f"{self.op}: copy {i} is {found}", f"expected {tuple(p.shape)} on cpu", fix)
                if p.dtype is not torch.float32 or copy.dtype not in (torch.float16, torch.bfloat16):
                    found = f"{copy.dtype} of a parameter of {p.dtype}"
                    why = "expected float16 or bfloat16 of float32"
                    raise TensorError(f"{self.op}: copy {i} is {found}", why, "leave it out")
