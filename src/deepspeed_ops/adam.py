"""``FusedAdam`` and ``DeepSpeedCPUAdam``: torch optimizers over the ops ``fused_adam`` and ``cpu_adam``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_ops import cpu_adam, fused_adam
from deepspeed_ops.adam_op import groups_by_dtype
from deepspeed_ops.adam_scalars import AdamScalars, checked
from deepspeed_ops.adam_step import Amp, Step, make_step
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from deepspeed_ops.tensor_table import identities, is_plain
from deepspeed_ops.tracked_state import Epoch, TrackedStates

_grad_of = attrgetter("grad")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Bucket:
    """Parameters of one group that one launch updates."""

    pick: Callable[[list[Any]], Any] | None  # from the group's gradients to the bucket's; None = all of them, in order
    step: Step
    counters: Tensor  # int64 [n]; state["step"] of each parameter is a view of its element
    p: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]

    def gradients(self, all_gradients: list[Any]) -> list[Any]:
        if self.pick is None:
            return all_gradients
        picked = self.pick(all_gradients)
        return list(picked) if len(self.p) > 1 else [picked]


@dataclass
class _Plan:
    """How one parameter group is stepped, as long as nothing it was made from changes."""

    params: list[Tensor]  # keeps the objects alive, so that their identities mean something
    identity: bytes
    epoch: int
    on_device: bool
    buckets: list[_Bucket]
    without_state: Callable[[list[Any]], Any] | None  # gradients of parameters that have had none so far


class _Adam(torch.optim.Optimizer):
    """What both optimizers share: state, plans, checkpoints."""

    op: ClassVar[str]
    _own: ClassVar[tuple[str, ...]]  # attributes of the class that a copy or a pickle takes along
    # Whether the user promised that parameters and moments keep their memory (FusedAdam's fixed_storage).
    _fixed_storage = False
    # GradScaler hands over its scale and whether any gradient was infinite, instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any], adam_w_mode: bool, capturable: bool = False) -> None:
        self._adamw, self._capturable = bool(adam_w_mode), bool(capturable)
        if isinstance(defaults["lr"], str):
            raise DtypeError(f"{self.op}: lr is {defaults['lr']!r}", "expected a number, found str", "lr=1e-3")
        super().__init__(params, defaults)
        self._prepare()
        for group in self.param_groups:
            self._scalars(group)

    def _prepare(self) -> None:
        """What is not part of a pickled optimizer."""
        self._epoch = Epoch()
        self._plans: dict[int, _Plan] = {}
        self._checked: dict[int, tuple[Any, AdamScalars]] = {}
        self._track(self.state)

    def _track(self, states: Any) -> None:
        self.state = self._tracked = TrackedStates(self._epoch, states)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, value in (("_adamw", True), ("_capturable", False)):
            self.__dict__.setdefault(name, value)
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in self._own if name in self.__dict__}
        return {**super().__getstate__(), "_adamw": self._adamw, "_capturable": self._capturable, **own}

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        raise NotImplementedError

    # --- stepping ---

    def _step_with(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @torch._disable_dynamo  # a compiled training step breaks here and runs the kernels as they are
    @torch.no_grad()
    def _step_all(self) -> None:
        if self.state is not self._tracked:
            self._track(self.state)
            self._epoch.value += 1
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for index, group in enumerate(self.param_groups):
            if group["params"]:
                self._step_group(index, group, amp)
            group["step"] = group.get("step", 0) + 1

    def _scalars(self, group: Mapping[str, Any]) -> tuple[AdamScalars, Tensor | None]:
        """The group's scalars, checked when they change, and its lr where that is a tensor on a GPU."""
        lr = group["lr"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        if isinstance(lr, Tensor) and not on_device:
            lr = float(lr)
        key = (0.0 if on_device else lr, *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        known = self._checked.get(id(group))
        if known is None or known[0] != key:
            scalars = checked(self.op, key[0], group["betas"], *key[3:5], self._adamw, key[5])
            self._checked[id(group)] = known = (key, scalars)
        return known[1], lr.to(torch.float32) if on_device else None

    def _step_group(self, index: int, group: dict[str, Any], amp: Amp) -> None:
        params = group["params"]
        scalars, lr = self._scalars(group)
        on_device = params[0].device.type == "cuda" and (
            self._capturable or lr is not None or (amp.found_inf is not None and amp.found_inf.device.type == "cuda")
        )
        gradients = list(map(_grad_of, params))
        plan = self._plans.get(index)
        if (
            plan is None
            or plan.epoch != self._epoch.value
            or plan.on_device != on_device
            or plan.identity != identities(params)
            or (plan.without_state is not None and _any(plan.without_state(gradients)))
        ):
            plan = self._plans[index] = self._plan(params, gradients, on_device)
        for attempt in (0, 1):
            try:
                for bucket in plan.buckets:
                    self._step_bucket(bucket, bucket.gradients(gradients), scalars, lr, amp)
                return
            except (TensorError, DtypeError):
                # A parameter may have changed dtype, device or size since the plan was made: plan again, once. Tables are
                # checked before anything is launched, so no bucket is stepped twice unless one before it was; then raise.
                if attempt or any(b is not plan.buckets[0] for b in plan.buckets):
                    raise
                plan = self._plans[index] = self._plan(params, gradients, on_device)

    def _step_bucket(self, bucket: _Bucket, g: list[Any], scalars: AdamScalars, lr: Tensor | None, amp: Amp) -> None:
        lists = (bucket.p, g, bucket.m, bucket.v)
        bucket.step.run(lists, bucket.counters, scalars, lr, amp)
        if not self._fixed_storage:
            torch.autograd.graph.increment_version(bucket.p)

    # --- planning ---

    def _plan(self, params: list[Tensor], gradients: list[Any], on_device: bool) -> _Plan:
        have_state = [i for i, p in enumerate(params) if gradients[i] is not None or len(self._tracked.get(p, ()))]
        for i in have_state:
            self._check(i, params[i], gradients[i])
            self._init_state(params[i])
        moments = [self._tracked.of(p).get("exp_avg") for p in params]
        buckets = []
        for part in groups_by_dtype(params, gradients, moments):  # type: ignore[arg-type]
            buckets.append(self._bucket(part, params, gradients, on_device))
        covered = set(chain.from_iterable(groups_by_dtype(params, gradients, moments)))  # type: ignore[arg-type]
        rest = [i for i in range(len(params)) if i not in covered]
        epoch = self._epoch.value
        return _Plan(list(params), identities(params), epoch, on_device, buckets, itemgetter(*rest) if rest else None)

    def _bucket(self, part: list[int], params: list[Tensor], gradients: list[Any], on_device: bool) -> _Bucket:
        states = [self._tracked.of(params[i]) for i in part]
        p, g = [params[i] for i in part], [gradients[i] for i in part]
        m, v = ([s[key] for s in states] for key in _MOMENTS)
        device = p[0].device if on_device else torch.device("cpu")
        counters = torch.tensor([int(s["step"]) for s in states], dtype=torch.int64).to(device)
        step = make_step(self.op, (p, g, m, v))
        step.fixed_storage = self._fixed_storage
        for state, counter in zip(states, counters.unbind(), strict=True):
            state.quietly("step", counter)
        everything = part == list(range(len(params)))
        return _Bucket(None if everything else itemgetter(*part), step, counters, p, m, v)

    def _check(self, index: int, p: Tensor, g: Tensor | None) -> None:
        if not is_plain(p) or (g is not None and not is_plain(g)):
            raise TensorError(
                f"{self.op}: parameter {index} or its gradient is a {type(p).__name__}",
                "the optimizer updates memory by address, which only a plain Tensor or Parameter has",
                "torch.ops.deepspeed.fused_adam_ on the local tensors",
            )
        if g is not None and g.layout is not torch.strided:
            raise TensorError(
                f"{self.op}: gradient {index} is sparse", "Adam's moments are dense", "use torch.optim.SparseAdam, or sparse=False"
            )

    def _init_state(self, p: Tensor) -> None:
        state = self._tracked.of(p)
        if "exp_avg" in state:
            return
        state.quietly("step", 0)
        for key in _MOMENTS:
            state.quietly(key, torch.zeros_like(p, dtype=self._state_dtype(p), memory_format=torch.preserve_format))

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with ``step`` of each parameter as an int, and moments in their own dtype."""
        packed = super().state_dict()
        packed["state"] = {
            key: {k: int(v) if k == "step" else v for k, v in state.items()} for key, state in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep the dtype they were saved in (torch casts them to the parameter's).

        Checkpoints of DeepSpeed load. Its ``FusedAdam`` counted only the last parameter of a group and saved step 0 for the
        others; such a parameter (step 0, second moment not 0) gets the group's highest step.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        mine = chain.from_iterable(g["params"] for g in self.param_groups)
        for saved_id, p in zip(saved_ids, mine, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is None:
                continue
            state = self._tracked.of(p)
            for key in _MOMENTS:
                if key in saved:
                    own = torch.empty_like(p, dtype=saved[key].dtype, memory_format=torch.preserve_format)
                    state.quietly(key, own.copy_(saved[key].reshape(p.shape)))
            state.quietly("step", int(saved.get("step", 0)))
        for group in self.param_groups:
            self._mend_steps(group)
        self._epoch.value += 1

    def _mend_steps(self, group: dict[str, Any]) -> None:
        states = [self._tracked.of(p) for p in group["params"] if "exp_avg_sq" in self._tracked.get(p, ())]
        highest = max((int(s["step"]) for s in states), default=0)
        highest = max(highest, int(group.get("step", 0) or 0))
        for state in states:
            if int(state["step"]) == 0 and bool(state["exp_avg_sq"].any()):
                if highest == 0:
                    warnings.warn(
                        f"{self.op}: the checkpoint counts no step although its moments are not zero; "
                        "bias correction starts again at step 1",
                        stacklevel=3,
                    )
                    return
                state.quietly("step", highest)
        group["step"] = highest


def _any(picked: Any) -> bool:
    if isinstance(picked, tuple):
        return any(x is not None for x in picked)
    return picked is not None


def _refuse_amsgrad(op: str, amsgrad: bool) -> None:
    if amsgrad:
        raise UsageError(f"{op}: amsgrad=True", "the kernels have no AMSGrad variant", "torch.optim.AdamW(amsgrad=True)")


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
            offload, no resharding) and that no graph from before a step is used after it. Then only gradients are looked
            at, which halves the host's time of a step over thousands of tensors; a broken promise corrupts memory.

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
    _own = ("adam_w_mode", "set_grad_none")
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
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, adam_w_mode, capturable)
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

    def step(  # type: ignore[override]
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
            TensorError, DtypeError: a parameter or gradient that cannot be used; then nothing of its bucket was changed.
        """
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        for name, value in {**given, **kwargs}.items():
            if value is not None:
                raise UsageError(
                    f"fused_adam: step({name}=...)", "the argument belongs to apex's old interface", "set p.grad, then step()"
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
    _own = ("adam_w_mode", "fp32_optimizer_states", "opt_id")
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
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, adamw_mode)
        self.opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self.adam_w_mode = adamw_mode

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else p.dtype

    def _check(self, index: int, p: Tensor, g: Tensor | None) -> None:
        super()._check(index, p, g)
        if p.device.type != "cpu":
            raise TensorError(f"cpu_adam: parameter {index} is on {p.device}", "expected the CPU", "use FusedAdam, or p.cpu()")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. Mutates parameters and state.

        Args:
            closure: computes the loss anew; its value is returned.

        Raises:
            TensorError, DtypeError: a parameter or gradient that cannot be used; then nothing of its bucket was changed.
        """
        return self._step_with(closure)
