"""Saving, loading and copying optimizers: what goes on must be bit-equal to what would have gone on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bits
from torch.nn import Parameter
from training import both, give, trained

from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam


def resume(cls: Any, a: Any, pa: list[Parameter], make: Callable[[], tuple[Any, list[Parameter]]]) -> None:
    """Steps the original and the restored one with equal gradients; bits must stay equal."""
    b, pb = make()
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        give(pa, generator)
        for x, y in zip(pa, pb, strict=True):
            y.grad = x.grad.clone() if x.grad is not None else None
        a.step()
        b.step()
    for x, y in zip(pa, pb, strict=True):
        assert_bits("p", x, y)
        assert_bits("v", a.state[x]["exp_avg_sq"], b.state[y]["exp_avg_sq"])
        assert int(a.state[x]["step"]) == int(b.state[y]["step"])
    b.zero_grad()


@both
def test_state_dict_through_a_file(cls: Any, rng: torch.Generator) -> None:
    """Fault: what is saved is not what is loaded."""
    a, pa = trained(cls, rng)
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)

    def make() -> tuple[Any, list[Parameter]]:
        pb = [Parameter(p.detach().clone()) for p in pa]
        b = cls(pb, lr=0.5)
        b.load_state_dict(torch.load(file, weights_only=True))
        return b, pb

    saved = a.state_dict()["state"][0]
    assert set(saved) == {"step", "exp_avg", "exp_avg_sq"} and type(saved["step"]) is int and saved["step"] == 3
    resume(cls, a, pa, make)


def test_float32_state_of_bfloat16_parameters_is_kept(rng: torch.Generator) -> None:
    """Fault: torch's load_state_dict casts moments to the parameter's dtype: 16 bits of them are gone."""
    pa = [Parameter(torch.randn(33, generator=rng).bfloat16())]
    a = DeepSpeedCPUAdam(pa, lr=0.01)
    for _ in range(3):
        give(pa, rng)
        a.step()

    def make() -> tuple[Any, list[Parameter]]:
        pb = [Parameter(p.detach().clone()) for p in pa]
        b = DeepSpeedCPUAdam(pb)
        b.load_state_dict(copy.deepcopy(a.state_dict()))
        assert b.state[pb[0]]["exp_avg"].dtype is torch.float32
        return b, pb

    resume(DeepSpeedCPUAdam, a, pa, make)


@both
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_step_alike(cls: Any, way: str, rng: torch.Generator) -> None:
    """Fault: a copy shares memory with the original, or lacks attributes (zero_grad raised AttributeError)."""
    kw = {"adam_w_mode": False} if cls is FusedAdam else {"adamw_mode": False, "fp32_optimizer_states": False}
    a, pa = trained(cls, rng, **kw)
    for p in pa:
        p.grad = None

    def make() -> tuple[Any, list[Parameter]]:
        b = copy.deepcopy(a) if way == "deepcopy" else pickle.loads(pickle.dumps(a))
        return b, b.param_groups[0]["params"]

    b, pb = make()
    assert {x.data_ptr() for x in pa}.isdisjoint(x.data_ptr() for x in pb)
    assert a.state[pa[0]]["exp_avg"].data_ptr() != b.state[pb[0]]["exp_avg"].data_ptr()
    assert b.adam_w_mode == a.adam_w_mode
    resume(cls, a, pa, make)


@both
def test_loading_after_steps_replaces_the_state(cls: Any, rng: torch.Generator) -> None:
    """Fault: a plan made before the load goes on with the old moments."""
    a, pa = trained(cls, rng)
    saved = copy.deepcopy(a.state_dict())
    values = [p.detach().clone() for p in pa]

    def make() -> tuple[Any, list[Parameter]]:
        b, pb = trained(cls, torch.Generator().manual_seed(1), steps=7)
        for x, v in zip(pb, values, strict=True):
            x.data.copy_(v)
        b.load_state_dict(saved)
        return b, pb

    resume(cls, a, pa, make)


def test_old_deepspeed_fused_adam_checkpoint(rng: torch.Generator) -> None:
    """Fault: DeepSpeed's FusedAdam saved step 0 for all but one parameter of a group; taken literally, bias
    correction starts again with full moments: the next step is ten times too large."""
    a, pa = trained(FusedAdam, rng, steps=5)
    saved = copy.deepcopy(a.state_dict())
    saved["state"][0]["step"] = 0
    saved["state"][2]["step"] = 0
    for group in saved["param_groups"]:
        group["step"] = 5

    def make() -> tuple[Any, list[Parameter]]:
        pb = [Parameter(p.detach().clone()) for p in pa]
        b = FusedAdam(pb)
        b.load_state_dict(saved)
        assert [int(b.state[p]["step"]) for p in pb] == [5, 5, 5]
        assert b.param_groups[0]["step"] == 5
        return b, pb

    resume(FusedAdam, a, pa, make)


def test_checkpoint_that_counts_nothing_warns(rng: torch.Generator) -> None:
    """Fault: a checkpoint whose steps are all lost is continued in silence."""
    a, pa = trained(FusedAdam, rng)
    saved = copy.deepcopy(a.state_dict())
    for state in saved["state"].values():
        state["step"] = 0
    for group in saved["param_groups"]:
        group["step"] = 0
    b = FusedAdam([Parameter(p.detach().clone()) for p in pa])
    with pytest.warns(UserWarning, match="counts no step"):
        b.load_state_dict(saved)


def test_checkpoint_of_torch_adamw_loads(rng: torch.Generator) -> None:
    """Fault: a job that changes its optimizer has to start again."""
    pb = [Parameter(torch.randn(17, generator=rng))]
    theirs = torch.optim.AdamW(pb, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        give(pb, rng)
        theirs.step()
    pa = [Parameter(pb[0].detach().clone())]
    ours = FusedAdam(pa, lr=0.01, weight_decay=0.1)
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(saved)
    give(pa, rng)
    assert pa[0].grad is not None
    pb[0].grad = pa[0].grad.clone()
    ours.step()
    theirs.step()
    assert int(ours.state[pa[0]]["step"]) == 4
    assert torch.allclose(pa[0], pb[0], rtol=1e-6, atol=1e-7)
