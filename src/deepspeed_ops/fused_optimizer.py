"""What the optimizers for GPU tensors share under DeepSpeed's names: options, ``zero_grad``, apex's old arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from deepspeed_ops.op_builder.errors import UsageError
from deepspeed_ops.table_optimizer import TableOptimizer


def refuse_amsgrad(op: str, amsgrad: bool, instead: str) -> None:
    """Refuse what no kernel does.

    Raises:
        UsageError: it is asked for.
    """
    if amsgrad:
        raise UsageError(f"{op}: amsgrad=True", "the kernels have no AMSGrad variant", instead)


class FusedOptimizer(TableOptimizer):
    """Base class of FusedAdam and FusedLion.

    Args:
        params: iterable of parameters or of group dicts.
        defaults: options of a group.
        set_grad_none: :meth:`zero_grad` drops gradients instead of zeroing them.
        capturable: count steps on the device, so that a CUDA graph may hold a step.
        fixed_storage: the user's promise that parameters and state keep their memory between steps.
    """

    own: ClassVar[tuple[str, ...]] = ("set_grad_none",)

    def __init__(
        self, params: Any, defaults: dict[str, Any], set_grad_none: bool, capturable: bool, fixed_storage: bool
    ) -> None:
        super().__init__(params, defaults, capturable)
        for group in self.param_groups:
            group.setdefault("step", 0)
        self._fixed_storage = bool(fixed_storage)
        self.set_grad_none = set_grad_none

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
                    f"{self.op}: step({name}=...)",
                    "the argument belongs to apex's old interface",
                    "set p.grad, then step()",
                )
        return self._step_with(closure)
