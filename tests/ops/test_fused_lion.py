"""FusedLion and DeepSpeedCPULion against the float64 formula, and DeepSpeed's function names."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bits, assert_close
from deepspeed_ops.op_builder.errors import TensorError, UsageError
from family import give, parameters, twins
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_optimizers import lion
from torch.nn import Parameter

from deepspeed_ops.fused_lion import multi_tensor_lion
from deepspeed_ops.lion import DeepSpeedCPULion, FusedLion


def test_both_classes_give_equal_bits_on_the_cpu(rng: torch.Generator) -> None:
    """Fault: two optimizers of one name and two kinds of rounding."""
    pa = parameters(rng)
    pb = twins(pa)
    a, b = FusedLion(pa, lr=0.01, weight_decay=0.1), DeepSpeedCPULion(pb, lr=0.01, weight_decay=0.1)
    for _ in range(4):
        give(pa, rng)
        for x, y in zip(pa, pb, strict=True):
            y.grad = x.grad.clone()
        a.step()
        b.step()
    for x, y in zip(pa, pb, strict=True):
        assert_bits("p", x, y)
        assert_bits("m", a.state[x]["exp_avg"], b.state[y]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 511, 512, 513, 100_003])
def test_step_against_float64(n: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a wrong tail, scale or sign on either device."""
    start, g = (torch.randn(n, generator=rng).to(dtype) for _ in range(2))
    p = Parameter(start.to(device))
    optimizer = FusedLion([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    m = torch.zeros(n, dtype=dtype)
    before = start.clone()
    for _ in range(3):
        p.grad = g.to(device)
        optimizer.step()
        ref = lion(before, g, m, 0.01, 0.9, 0.99, 0.1)
        assert_close("p", p, ref.p, ref.p_scale)
        before, m = p.detach().cpu().clone(), optimizer.state[p]["exp_avg"].cpu().clone()
        assert_close("m", m, ref.m, ref.m_scale)


def test_zero_update_moves_nothing(device: torch.device) -> None:
    """Fault: a parameter without any gradient so far walks off by lr each step."""
    p = Parameter(torch.tensor([1.0, -1.0, 0.0], device=device))
    optimizer = FusedLion([p], lr=0.5)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p.tolist() == [1.0, -1.0, 0.0]


def test_multi_tensor_lion_of_deepspeed(device: torch.device, rng: torch.Generator) -> None:
    """Fault: an argument in another place than DeepSpeed's callers put it; the noop flag ignored."""
    p, g, m = ([torch.randn(n, generator=rng).to(device) for n in (5, 700)] for _ in range(3))
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    before = [x.clone() for x in p]
    flag.fill_(1)
    multi_tensor_lion(2048 * 32, flag, [g, p, m], 0.01, 0.9, 0.99, 1, 0.1)
    assert all(torch.equal(x, y) for x, y in zip(p, before, strict=True))
    flag.zero_()
    old = [x.cpu().clone() for x in m]
    multi_tensor_lion(2048 * 32, flag, [g, p, m], 0.01, 0.9, 0.99, 1, 0.1)
    for x, start, gi, mi in zip(p, before, g, old, strict=True):
        ref = lion(start.cpu(), gi.cpu(), mi, 0.01, 0.9, 0.99, 0.1)
        assert_close("p", x, ref.p, ref.p_scale)
    with pytest.raises(UsageError, match="step"):
        multi_tensor_lion(1, flag, [g, p, m], 0.01, 0.9, 0.99, 0, 0.1)
    with pytest.raises(TensorError, match="lists"):
        multi_tensor_lion(1, flag, [g, p], 0.01, 0.9, 0.99, 1, 0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.99),
    st.integers(0, 2**31),
)
def test_a_step_moves_by_lr_or_not_at_all(values: list[float], lr: float, beta: float, seed: int) -> None:
    """Property: without decay every element moves by exactly lr (rounded), or, where c is 0, stays."""
    rng = torch.Generator().manual_seed(seed)
    p = Parameter(torch.tensor(values))
    g = torch.randn(len(values), generator=rng) * torch.randint(0, 2, (len(values),), generator=rng)
    before = p.detach().clone()
    p.grad = g
    FusedLion([p], lr=lr, betas=(beta, 0.99)).step()
    c = torch.tensor(1.0 - beta, dtype=torch.float32) * g
    assert torch.equal(p.detach(), before - torch.tensor(lr, dtype=torch.float32) * c.sign())
