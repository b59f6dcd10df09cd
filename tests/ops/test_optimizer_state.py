"""State of the optimizers: changed behind their back, scaled, scheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bits
from deepspeed_ops.op_builder.errors import OpsError
from torch.nn import Parameter
from training import both, give, trained

from deepspeed_ops.adam import FusedAdam

# ---- changed behind its back ------------------------------------------------------------------------------------


def swap_p_data(o: Any, p: Parameter) -> None:
    p.data = p.data.clone()


def replace_moment(o: Any, p: Parameter) -> None:
    o.state[p]["exp_avg"] = o.state[p]["exp_avg"].clone()


def swap_moment_data(o: Any, p: Parameter) -> None:
    o.state[p]["exp_avg_sq"].data = o.state[p]["exp_avg_sq"].data.clone()


def replace_state(o: Any, p: Parameter) -> None:
    o.state[p] = {k: v.clone() if k != "step" else int(v) for k, v in o.state[p].items()}


def replace_all_states(o: Any, p: Parameter) -> None:
    o.state = {q: dict(s) for q, s in o.state.items()}


def update_states(o: Any, p: Parameter) -> None:
    o.state.update({p: {k: v.clone() for k, v in o.state[p].items()}})


def merge_states(o: Any, p: Parameter) -> None:
    o.state |= {p: {k: v.clone() for k, v in o.state[p].items()}}


def pop_and_return_state(o: Any, p: Parameter) -> None:
    q, state = o.state.popitem()
    o.state[q] = {k: v.clone() for k, v in state.items()}


def list_of_params_anew(o: Any, p: Parameter) -> None:
    o.param_groups[0]["params"] = list(reversed(o.param_groups[0]["params"]))


def step_as_int(o: Any, p: Parameter) -> None:
    o.state[p]["step"] = int(o.state[p]["step"])


CHANGES = [
    swap_p_data, replace_moment, swap_moment_data, replace_state, replace_all_states, update_states, merge_states,
    pop_and_return_state, list_of_params_anew, step_as_int,
]  # fmt: skip


@both
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_replaced_memory_is_noticed(cls: Any, change: Callable[..., None], rng: torch.Generator) -> None:
    """Fault: a cached address of memory that somebody replaced: the old copy is stepped, or freed memory written."""
    seed = rng.get_state()
    a, pa = trained(cls, rng)
    rng.set_state(seed)
    b, pb = trained(cls, rng)
    for p in list(pa):
        change(a, p)
    for optimizer, params in ((a, pa), (b, pb)):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 + i)
        optimizer.step()
    for x, y in zip(pa, pb, strict=True):
        assert_bits("p", x, y)
        assert_bits("exp_avg", a.state[x]["exp_avg"], b.state[y]["exp_avg"])
        assert int(a.state[x]["step"]) == int(b.state[y]["step"]) == 4


@both
def test_step_set_by_hand(cls: Any, rng: torch.Generator) -> None:
    """Fault: the counter that is shown is not the one that is used."""
    a, pa = trained(cls, rng)
    a.state[pa[0]]["step"] = 999
    a.state[pa[1]]["step"].fill_(99)
    give(pa, rng)
    a.step()
    assert [int(a.state[p]["step"]) for p in pa] == [1000, 100, 4]


@both
def test_state_cleared_starts_again(cls: Any, rng: torch.Generator) -> None:
    """Fault: moments that the user threw away go on working."""
    a, pa = trained(cls, rng)
    a.state.clear()
    fresh = [Parameter(p.detach().clone()) for p in pa]
    b = cls(fresh, lr=0.01, weight_decay=0.1)
    for x, y in zip(pa, fresh, strict=True):
        x.grad, y.grad = torch.ones_like(x), torch.ones_like(y)
    a.step()
    b.step()
    for x, y in zip(pa, fresh, strict=True):
        assert_bits("p", x, y)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_model_moved_to_another_dtype(cls: Any, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Fault: half of a parameter's new bytes read as float32. Right result or a typed error, in one bucket or two."""
    for mixed in (False, True):
        a, pa = trained(cls, rng)
        if mixed:
            pa[1].data = pa[1].data.to(torch.bfloat16)
            pa[1].grad = None
        for p in pa if not mixed else pa[1:2]:
            p.grad = None
            p.data = p.data.to(dtype)
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in pa]
        try:
            a.step()
        except OpsError as refusal:
            assert "torch." in str(refusal)
            for x, y in zip(pa, before, strict=True):
                assert_bits("p", x, y)
        else:
            for x, y in zip(pa, before, strict=True):
                if x.grad is not None and x.dtype is dtype:
                    moved = (x.detach().float() - y.float()).abs()
                    assert bool((moved <= 0.05).all()), "a step of lr 0.01 moved a parameter by more than 0.05"


def test_parameter_made_larger(rng: torch.Generator) -> None:
    """Fault: a parameter's size is cached and the moments are too short for the new one."""
    a, pa = trained(FusedAdam, rng)
    pa[0].grad = None
    pa[0].data = torch.ones(50_000)
    pa[0].grad = torch.ones(50_000)
    with pytest.raises(OpsError, match=r"elements|strides|shape"):
        a.step()
    assert bool((pa[0] == 1).all())


# ---- groups, schedulers, scalers --------------------------------------------------------------------------------


@both
def test_groups_and_added_groups(cls: Any, rng: torch.Generator) -> None:
    """Fault: options of one group used for another, or a group that came later is not stepped."""
    p, q, r = (Parameter(torch.ones(9)) for _ in range(3))
    optimizer = cls([{"params": [p], "lr": 0.1}, {"params": [q], "weight_decay": 0.5, "betas": (0.5, 0.9)}], lr=0.2)
    for x in (p, q, r):
        x.grad = torch.ones(9)
    optimizer.step()
    optimizer.add_param_group({"params": [r], "lr": 0.3, "eps": 1e-3})
    optimizer.step()
    for x, options, steps in (
        (p, {"lr": 0.1}, 2),
        (q, {"lr": 0.2, "weight_decay": 0.5, "betas": (0.5, 0.9)}, 2),
        (r, {"lr": 0.3, "eps": 1e-3}, 1),
    ):
        y = Parameter(torch.ones(9))
        alone = cls([y], **options)
        y.grad = torch.ones(9)
        for _ in range(steps):
            alone.step()
        assert_bits("p", x, y)


@both
def test_lr_scheduler(cls: Any, rng: torch.Generator) -> None:
    """Fault: the first learning rate is cached."""
    p, q = Parameter(torch.ones(9)), Parameter(torch.ones(9))
    a, b = cls([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (a, b)]
    for _ in range(5):
        p.grad, q.grad = torch.ones(9), torch.ones(9)
        for o, s in zip((a, b), schedules, strict=True):
            o.step()
            s.step()
    assert torch.allclose(p, q, rtol=1e-6)
    assert abs(float(1 - p[0].detach()) - 0.1 * (1 + 0.5 + 0.25 + 0.125 + 0.0625)) < 1e-4


@both
def test_lr_as_tensor_on_the_cpu(cls: Any) -> None:
    """Fault: a tensor learning rate is compared by identity, and a change in place goes unnoticed."""
    lr = torch.tensor(0.25)
    p = Parameter(torch.ones(4))
    optimizer = cls([p], lr=lr)
    p.grad = torch.ones(4)
    optimizer.step()
    assert torch.allclose(p, torch.full((4,), 0.75))
    lr.fill_(0.5)
    optimizer.step()
    assert torch.allclose(p, torch.full((4,), 0.25))


@both
def test_closure(cls: Any) -> None:
    """Fault: the closure runs without gradients, or its value is lost."""
    p = Parameter(torch.ones(4))
    optimizer = cls([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert torch.allclose(p, torch.full((4,), 0.9))


@both
def test_grad_scaler_on_the_cpu(cls: Any) -> None:
    """Fault: gradients stay scaled, or a step with an infinite gradient happens or counts."""
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    a, b = cls([p], lr=0.1), cls([q], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        for o in (a, b):
            o.zero_grad(set_to_none=True)
        weight = float("inf") if step == 2 else float(step + 1)
        scaler.scale((p * weight).sum()).backward()
        scaler.step(a)
        scaler.update()
        if step != 2:
            q.grad = torch.full((4,), weight)
            b.step()
    assert_bits("p", p, q)
    assert int(a.state[p]["step"]) == 3
    assert float(scaler.get_scale()) == 512.0


@both
def test_scale_and_found_inf_as_attributes(cls: Any) -> None:
    """Fault: the attributes that GradScaler sets on an optimizer are not read."""
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    a, b = cls([p], lr=0.1, eps=1.0), cls([q], lr=0.1, eps=1.0)
    a.grad_scale, a.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    p.grad, q.grad = torch.full((4,), 8.0), torch.ones(4)
    a.step()
    b.step()
    assert_bits("p", p, q)
    a.found_inf = torch.tensor(1.0)
    a.step()
    assert_bits("p", p, q)
    assert int(a.state[p]["step"]) == 1
