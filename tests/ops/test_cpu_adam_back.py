"""cpu_adam: steps taken back, state under numbers, copies in half precision."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bits, assert_close
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from raw import BF16, COMBINATIONS, F16, F32, combination_id, copies, random_tensors
from reference import Hyper
from reference_optimizers import adam_back
from torch.nn import Parameter

from deepspeed_ops.adam import DeepSpeedCPUAdam
from deepspeed_ops.cpu_adam import adam_rollback, adam_update, adam_update_copy, create_adam, destroy_adam

LEVELS = ("scalar", "avx2", "avx512")
at_every_level = pytest.mark.parametrize("level", LEVELS, indirect=True)


@at_every_level
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_rollback_is_the_inverse_formula(
    combination: tuple[torch.dtype, ...], adamw: bool, level: str, rng: torch.Generator
) -> None:
    """Fault: DeepSpeed prints an error for half formats and ignores flags; a tail or a decay not taken back."""
    h = Hyper(weight_decay=0.1, adamw=adamw)
    create_adam(8, 0.01, 0.9, 0.999, 1e-8, 0.1, adamw, False)
    for n in (1, 7, 17, 1025):
        for step in (1, 5):
            p, g, m, v = random_tensors(n, combination, rng)
            ref = adam_back(p, g, m, v, step, h)
            assert adam_rollback(8, step, 0.01, 0.9, 0.999, 1e-8, 0.1, True, p, g, m, v) == 0
            assert_close("p", p, ref.p, ref.p_scale)
            assert_close("m", m, ref.m, ref.m_scale)
            assert_close("v", v, ref.v, ref.v_scale)
    destroy_adam(8)


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_forward_and_back(combination: tuple[torch.dtype, ...], adamw: bool, rng: torch.Generator) -> None:
    """Fault: a step back that leads elsewhere than where the step began. What storage rounds away stays lost."""
    create_adam(8, 0.01, 0.9, 0.999, 1e-8, 0.1, adamw, False)
    before = random_tensors(4099, combination, rng)
    t = copies(before)
    args = (8, 7, 0.01, 0.9, 0.999, 1e-8, 0.1, True, *t)
    adam_update(*args)
    adam_rollback(*args)
    destroy_adam(8)
    for name, x, old in zip("pgmv", t, before, strict=True):
        eps = float(torch.finfo(x.dtype).eps)
        if not adamw and name != "p":  # the gradient holds the old p, of which storage has kept so much
            eps = max(eps, 0.1 * float(torch.finfo(before[0].dtype).eps))
        # An element moves by one rounding of the stored value each way; m and v as much again by 1 / beta. An update
        # that divides by the square root of a tiny v carries v's rounding into p.
        error = (x.double() - old.double()).abs()
        limit = 4 * eps * (old.double().abs() + (2.0 if name != "p" else 0.5))
        assert float((error <= limit).double().mean()) >= (1.0 if combination[2] is F32 and name != "p" else 0.99)


def test_first_step_back_leaves_exact_zeros(rng: torch.Generator) -> None:
    """Fault: moments of 1e-9 in place of the zeros that they were."""
    p, g, _, _ = random_tensors(100, (F32, F32, F32), rng)
    m, v = torch.zeros(100), torch.zeros(100)
    create_adam(8, 0.01, 0.9, 0.999, 1e-8, 0.0, True, False)
    args = (8, 1, 0.01, 0.9, 0.999, 1e-8, 0.0, True, p, g, m, v)
    adam_update(*args)
    adam_rollback(*args)
    assert not bool(m.any()) and not bool(v.any())
    with pytest.raises(UsageError, match="lr \\* weight_decay"):
        adam_rollback(8, 1, 1.0, 0.9, 0.999, 1e-8, 1.0, True, p, g, m, v)
    with pytest.raises(UsageError, match="unknown"):
        adam_rollback(77, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, p, g, m, v)
    destroy_adam(8)


# ---- sub-groups -------------------------------------------------------------------------------------------------


def test_subgroups_equal_ordinary_steps(rng: torch.Generator) -> None:
    """Fault: state of one piece used for another; a step counted twice."""
    pieces = [torch.randn(50, generator=rng) for _ in range(3)]
    plain = [Parameter(x.clone()) for x in pieces]
    whole = DeepSpeedCPUAdam(plain, lr=0.01, weight_decay=0.1)
    slot = Parameter(torch.zeros(50))
    optimizer = DeepSpeedCPUAdam([slot], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        grads = [torch.randn(50, generator=rng) for _ in pieces]
        for p, g in zip(plain, grads, strict=True):
            p.grad = g
        whole.step()
        for i, g in enumerate(grads):
            slot.data, slot.grad = pieces[i], g
            optimizer.step_subgroup(i)
    for i, p in enumerate(plain):
        assert_bits("p", pieces[i], p.detach())
        assert optimizer.state[i]["step"] == 3


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_subgroup_rollback(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Fault: the counter goes back and the data does not (DeepSpeed in half precision)."""
    start = torch.randn(64, generator=rng).to(dtype)
    slot = Parameter(start.clone())
    optimizer = DeepSpeedCPUAdam([slot], lr=0.01)
    slot.grad = torch.randn(64, generator=rng).to(dtype)
    with pytest.raises(
        RuntimeError, match="Cannot rollback optimizer state for sub_group_id 3 as it has not been init"
    ):
        optimizer.rollback_subgroup(3)
    optimizer.step_subgroup(3)
    assert not torch.equal(slot, start)
    optimizer.rollback_subgroup(3)
    assert bool(
        ((slot.float() - start.float()).abs() <= 2 * torch.finfo(dtype).eps * (start.float().abs() + 0.01)).all()
    )
    assert optimizer.state[3]["step"] == 0
    with pytest.raises(RuntimeError, match="Cannot rollback sub_group_id 3: step count is 0"):
        optimizer.rollback_subgroup(3)
    other = Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.ones(2)
    with pytest.raises(UsageError, match="2 parameters have a gradient"):
        optimizer.step_subgroup(3)
    slot.grad = other.grad = None
    optimizer.step_subgroup(3)
    assert optimizer.state[3]["step"] == 0


# ---- copies -----------------------------------------------------------------------------------------------------


@at_every_level
@pytest.mark.parametrize("copy_dtype", [F16, BF16], ids=str)
def test_copy_is_the_rounded_parameter(copy_dtype: torch.dtype, level: str, rng: torch.Generator) -> None:
    """Fault: a copy of the parameters of before, of some blocks only, or rounded another way."""
    create_adam(8, 0.01, 0.9, 0.999, 1e-8, 0.1, True, False)
    for n in (1, 17, 2047, 2048, 2049, 40_003):
        t = random_tensors(n, (F32, F32, F32), rng)
        alone = copies(t)
        adam_update(8, 3, 0.01, 0.9, 0.999, 1e-8, 0.1, True, *alone)
        copy = torch.zeros(n, dtype=copy_dtype)
        adam_update_copy(8, 3, 0.01, 0.9, 0.999, 1e-8, 0.1, True, *t, copy)
        assert_bits("p", t[0], alone[0])
        assert_bits("copy", copy, t[0].to(copy_dtype))
    p, g, m, v = random_tensors(5, (F32, F32, F32), rng)
    for error, bad in ((DtypeError, torch.zeros(5)), (TensorError, torch.zeros(4, dtype=copy_dtype))):
        with pytest.raises(error):
            adam_update_copy(8, 3, 0.01, 0.9, 0.999, 1e-8, 0.1, True, p, g, m, v, bad)
    with pytest.raises(DtypeError):
        adam_update_copy(8, 3, 0.01, 0.9, 0.999, 1e-8, 0.1, True, p.half(), g.half(), m, v, torch.zeros(5).half())
    destroy_adam(8)


def test_optimizer_writes_copies(rng: torch.Generator) -> None:
    """Fault: fp16_param_groups of DeepSpeed's former callers ignored; a copy of another step after a swap."""
    params = [Parameter(torch.randn(n, generator=rng)) for n in (5, 3000, 7)]
    optimizer = DeepSpeedCPUAdam(params, lr=0.1)
    outs: list[torch.Tensor | None] = [torch.zeros(5, dtype=F16), torch.zeros(3000, dtype=BF16), None]
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng)
        optimizer.step(fp16_param_groups=[outs])
        for p, out in zip(params, outs, strict=True):
            if out is not None:
                assert_bits("copy", out, p.detach().to(out.dtype))
        outs[0] = torch.zeros(5, dtype=F16)
    optimizer.step()
    assert not torch.equal(outs[1].float(), params[1].detach().bfloat16().float())  # type: ignore[union-attr]
    with pytest.raises(TensorError, match="copy 0"):
        optimizer.step(fp16_param_groups=[[torch.zeros(4, dtype=F16), None, None]])
    with pytest.raises(TensorError, match="3 parameters"):
        optimizer.step(fp16_param_groups=[[None]])
