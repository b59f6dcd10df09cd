"""The torch optimizer under all of ours: state, plans, tables of addresses, checkpoints. Knows no formula.

A step has two phases over all groups: *look* (addresses and layouts are read and checked, what changed is planned
anew) and *launch*. An argument that no kernel takes is found in the first, so that nothing was changed when the error
arrives.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import DtypeError, TensorError
from deepspeed_ops.registry import is_eager, updated_in_place
from deepspeed_ops.step_inputs import Amp, Given
from deepspeed_ops.tensor_checks import PLAIN, groups_by_dtype
from deepspeed_ops.tensor_table import identities
from deepspeed_ops.tracked_state import Epoch, TrackedStates

_grad_of = attrgetter("grad")
# Parameters of a group, a gradient or None for each, copies likewise or none at all.
Work = tuple[list[Tensor], list[Any], list[Any] | None]


class Step(Protocol):
    """The kernel side of one table: an object per set of tensors that share dtypes and device."""

    fixed_storage: bool

    def look(self, lists: Sequence[list[Any]]) -> int:
        """Read and check the addresses of p, g and the moments; the lists in which one moved, a bit each."""

    def launch(self, moved: int, counters: Tensor, scalars: Any, lr: Tensor | None, amp: Amp) -> None:
        """Count the step and update p and the moments."""


@dataclass
class Bucket:
    """Parameters of one group that one launch updates."""

    group: int
    part: list[int]  # positions in the group
    pick: Callable[[list[Any]], Any] | None  # from the group's gradients to the bucket's; None = all of them, in order
    step: Step
    counters: Tensor  # int64 [n]; state["step"] of each parameter is a view of its element
    lists: list[list[Tensor]]  # parameters, then each moment, then copies where there are any

    def with_gradients(self, gradients: list[Any]) -> list[list[Any]]:
        if self.pick is not None:
            picked = self.pick(gradients)
            gradients = list(picked) if len(self.lists[0]) > 1 else [picked]
        return [self.lists[0], gradients, *self.lists[1:]]


@dataclass
class _Plan:
    """How one parameter group is stepped, as long as nothing it was made from changes."""

    params: list[Tensor]  # keeps the objects alive, so that their identities mean something
    identity: bytes
    epoch: int
    on_device: bool
    buckets: list[Bucket]
    without_state: Callable[[list[Any]], Any] | None  # gradients of parameters that have had none so far
    copies: list[Any] | None

    def fits(
        self, params: list[Tensor], gradients: list[Any], copies: list[Any] | None, epoch: int, on_device: bool
    ) -> bool:
        """Whether the plan still holds."""
        if self.epoch != epoch or self.on_device != on_device or self.identity != identities(params):
            return False
        if (copies is None) != (self.copies is None):
            return False
        if copies is not None and any(a is not b for a, b in zip(copies, self.copies or (), strict=True)):
            return False
        rest = None if self.without_state is None else self.without_state(gradients)
        return all(x is None for x in rest) if isinstance(rest, tuple) else rest is None


_NOTHING_GIVEN = Given()


class TableOptimizer(torch.optim.Optimizer):
    """Base class. A subclass names its op and moments and makes the kernel side.

    Args:
        params: iterable of parameters or of group dicts.
        defaults: options of a group.
        capturable: count steps on the device.
    """

    op: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    own: ClassVar[tuple[str, ...]] = ()  # attributes of the subclass that a copy or a pickle takes along
    _fixed_storage = False
    _capturable = False
    # GradScaler hands over its scale and whether any gradient was infinite, instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any], capturable: bool = False) -> None:
        self._capturable = bool(capturable)
        if isinstance(defaults["lr"], str):
            raise DtypeError(f"{self.op}: lr is {defaults['lr']!r}", "expected a number, found str", "lr=1e-3")
        super().__init__(params, defaults)
        self._prepare()
        for group in self.param_groups:
            self._scalars(group)

    # --- what a subclass says ---

    @abstractmethod
    def _make_step(self, lists: Sequence[list[Any]]) -> Step:
        """The kernel side for p, g and the moments, which share dtypes and device."""

    @abstractmethod
    def _check_scalars(self, group: Mapping[str, Any], lr: float) -> Any:
        """The group's scalars as the kernel side takes them, checked."""

    @abstractmethod
    def _call_op(
        self, lists: list[list[Tensor]], steps: list[Tensor], scalars: Any, lr: Tensor | None, amp: Amp
    ) -> None:
        """The op under torch's dispatcher."""

    @abstractmethod
    def _state_dtype(self, p: Tensor) -> torch.dtype:
        """Dtype of the moments of a parameter."""

    # --- state ---

    def _prepare(self) -> None:
        """What is not part of a pickled optimizer."""
        self._epoch = Epoch()
        self._plans: dict[int, _Plan] = {}
        self._checked: dict[int, tuple[Any, Any]] = {}
        self._track(self.state)

    def _track(self, states: Any) -> None:
        self.state = self._tracked = TrackedStates(self._epoch, states)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # adds names of torch's own to the defaults
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_capturable", "_fixed_storage", *self.own)
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own if name in self.__dict__}}

    # --- stepping ---

    def _step_with(self, closure: Callable[[], Any] | None, given: Given = _NOTHING_GIVEN) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all(given)
        return loss

    # A compiled training step breaks here and runs the kernels as they are.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def _step_all(self, given: Given) -> None:
        if self.state is not self._tracked:
            self._track(self.state)
            self._epoch.value += 1
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        eager = is_eager()  # else a mode or a transform is to see what happens
        work = [self._work(i, group, given) for i, group in enumerate(self.param_groups)]
        amps = self._amps(amp, given, [gradients for _, gradients, _ in work])
        ready = [x for i, group in enumerate(self.param_groups) for x in self._look(i, group, work[i], amps[i], eager)]
        for launch in ready:
            launch()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def _work(self, index: int, group: dict[str, Any], given: Given) -> Work:
        """Parameters of a group, their gradients and where copies of them go."""
        params = group["params"]
        gradients = list(map(_grad_of, params)) if given.gradients is None else given.gradients[index]
        copies = None if given.copies is None else given.copies[index]
        for name, some in (("gradients", gradients), ("copies", copies)):
            if some is not None and len(some) != len(params):
                raise TensorError(
                    f"{self.op}: {len(some)} {name} for group {index}", f"it has {len(params)} parameters", ""
                )
        return params, gradients, copies

    def _amps(self, amp: Amp, given: Given, gradients: Sequence[list[Any]]) -> list[Amp]:
        """What each group's gradients are divided by, and whether the step counts."""
        return [amp] * len(gradients)

    def _look(self, index: int, group: dict[str, Any], work: Work, amp: Amp, eager: bool) -> list[Callable[[], None]]:
        """Check one group and return its launches."""
        params, gradients, copies = work
        if not params:
            return []
        scalars, lr = self._scalars(group)
        on_device = params[0].device.type == "cuda" and (
            self._capturable or lr is not None or (amp.found_inf is not None and amp.found_inf.device.type == "cuda")
        )
        if not eager:
            return [partial(self._dispatch, work, on_device, scalars, lr, amp)]
        plan = self._plans.get(index)
        if plan is not None and plan.fits(params, gradients, copies, self._epoch.value, on_device):
            try:
                return self._launches(plan, gradients, scalars, lr, amp)
            except (TensorError, DtypeError):
                pass  # dtype, device, size or layout changed since the plan was made: plan anew, and let that raise
        if not all(type(x) in PLAIN for x in chain(params, gradients) if x is not None):
            return [partial(self._dispatch, work, on_device, scalars, lr, amp)]
        plan = self._plans[index] = self._plan(index, work, on_device)
        return self._launches(plan, gradients, scalars, lr, amp)

    def _launches(
        self, plan: _Plan, gradients: list[Any], scalars: Any, lr: Tensor | None, amp: Amp
    ) -> list[Callable[[], None]]:
        looked = [(bucket, bucket.step.look(bucket.with_gradients(gradients))) for bucket in plan.buckets]
        return [partial(self._launch, bucket, moved, scalars, lr, amp) for bucket, moved in looked]

    def _launch(self, bucket: Bucket, moved: int, scalars: Any, lr: Tensor | None, amp: Amp) -> None:
        bucket.step.launch(moved, bucket.counters, scalars, lr, amp)
        if not self._fixed_storage:
            updated_in_place(bucket.lists[0])

    def _dispatch(self, work: Work, on_device: bool, scalars: Any, lr: Tensor | None, amp: Amp) -> None:
        """The same through ``torch.ops``, where modes, transforms and tensor subclasses have their say."""
        params, gradients, copies = work
        lists: list[list[Tensor]] = [[] for _ in range(2 + len(self.moments))]
        steps = []
        for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
            if g is None:
                continue
            self._check(i, g)
            self._init_state(p)
            state = self._tracked.of(p)
            if not isinstance(state["step"], Tensor):
                device = p.device if on_device else torch.device("cpu")
                state.quietly("step", torch.tensor(state["step"], dtype=torch.int64, device=device))
            steps.append(state["step"])
            for kept, x in zip(lists, (p, g, *(state[key] for key in self.moments)), strict=True):
                kept.append(x)
        if steps:
            self._call_op(lists, steps, scalars, lr, amp)
        for p, g, copy in zip(params, gradients, copies or (), strict=False):
            if g is not None and copy is not None:
                copy.copy_(p)

    def _scalars(self, group: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        """The group's scalars, checked when they change, and its lr where that is a tensor on a GPU."""
        lr = group["lr"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        number = 0.0 if on_device else float(lr) if isinstance(lr, Tensor) else lr
        key = (number, *(group[name] for name in self.defaults if name != "lr"))
        known = self._checked.get(id(group))
        if known is None or known[0] != key:
            self._checked[id(group)] = known = (key, self._check_scalars(group, number))
        return known[1], lr.to(torch.float32) if on_device else None

    # --- planning ---

    def _plan(self, index: int, work: Work, on_device: bool) -> _Plan:
        params, gradients, copies = work
        for i, p in enumerate(params):
            if gradients[i] is not None or len(self._tracked.get(p, ())):
                self._check(i, gradients[i])
                self._init_state(p)
        first_moments = [self._tracked.of(p).get(self.moments[0]) for p in params]
        parts = groups_by_dtype(params, gradients, first_moments, copies)
        covered = set(chain.from_iterable(parts))
        rest = [i for i in range(len(params)) if i not in covered]
        buckets = [self._bucket(index, part, work, on_device) for part in parts]
        without_state = itemgetter(*rest) if rest else None
        epoch = self._epoch.value
        return _Plan(
            list(params),
            identities(params),
            epoch,
            on_device,
            buckets,
            without_state,
            None if copies is None else list(copies),
        )

    def _bucket(self, index: int, part: list[int], work: Work, on_device: bool) -> Bucket:
        params, gradients, copies = work
        states = [self._tracked.of(params[i]) for i in part]
        lists = [[params[i] for i in part], *([s[key] for s in states] for key in self.moments)]
        if copies is not None and copies[part[0]] is not None:
            lists.append([copies[i] for i in part])
        device = lists[0][0].device if on_device else torch.device("cpu")
        counters = torch.tensor([int(s["step"]) for s in states], dtype=torch.int64).to(device)
        step = self._make_step([lists[0], [gradients[i] for i in part], *lists[1:]])
        step.fixed_storage = self._fixed_storage
        for state, counter in zip(states, counters.unbind(), strict=True):
            state.quietly("step", counter)
        everything = part == list(range(len(params)))
        return Bucket(index, part, None if everything else itemgetter(*part), step, counters, lists)

    def _check(self, index: int, g: Tensor | None) -> None:
        if g is not None and g.layout is not torch.strided:
            raise TensorError(
                f"{self.op}: gradient {index} is sparse",
                "the moments are dense",
                "use torch.optim.SparseAdam, or sparse=False",
            )

    def _init_state(self, p: Tensor) -> None:
        state = self._tracked.of(p)
        if self.moments[0] in state:
            return
        state.quietly("step", 0)
        for key in self.moments:
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

        Checkpoints of DeepSpeed load. Its fused optimizers counted only the last parameter of a group and saved step 0
        for the others; such a parameter (step 0, moments not 0) gets the group's highest step.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        mine = chain.from_iterable(g["params"] for g in self.param_groups)
        for saved_id, p in zip(saved_ids, mine, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is None:
                continue
            state = self._tracked.of(p)
            for key in self.moments:
                if key in saved:
                    own = torch.empty_like(p, dtype=saved[key].dtype, memory_format=torch.preserve_format)
                    state.quietly(key, own.copy_(saved[key].reshape(p.shape)))
            state.quietly("step", int(saved.get("step", 0)))
        for group in self.param_groups:
            self._mend_steps(group)
        self._epoch.value += 1

    def _mend_steps(self, group: dict[str, Any]) -> None:
        last = self.moments[-1]
        states = [self._tracked.of(p) for p in group["params"] if last in self._tracked.get(p, ())]
        highest = max((int(s["step"]) for s in states), default=0)
        highest = max(highest, int(group.get("step", 0) or 0))
        for state in states:
            if int(state["step"]) == 0 and bool(state[last].any()):
                if highest == 0:
                    warnings.warn(
                        f"{self.op}: the checkpoint counts no step although its moments are not zero; "
                        "bias correction starts again at step 1",
                        stacklevel=3,
                    )
                    return
                state.quietly("step", highest)
        group["step"] = highest
