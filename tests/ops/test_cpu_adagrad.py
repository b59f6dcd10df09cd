"""cpu_adagrad against the float64 reference: dtypes x SIMD levels x sizes, sparse rows, what must not change bits."""

from __future__ import annotations

import pytest
import torch
from compare import Mismatch, assert_bits, assert_close
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from raw import BF16, COMBINATIONS, F16, F32, combination_id
from raw_tables import cloned, made, step_tables
from reference_optimizers import adagrad
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_ops.adagrad_step import CpuAdagradStep
from deepspeed_ops.cpu_adagrad import adagrad_update, create_adagrad, destroy_adagrad
from deepspeed_ops.cpu_op import simd_levels

LEVELS = ("scalar", "avx2", "avx512")
at_every_level = pytest.mark.parametrize("level", LEVELS, indirect=True)
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 1023, 1024, 1025, 100_003)
SCALARS = {"lr": 0.01, "eps": 1e-10, "weight_decay": 0.1}


def step(tensors: list[list[Tensor]], level: str = "", threads: int = 1, **scalars: float) -> int:
    return step_tables(CpuAdagradStep, tensors, {**SCALARS, **scalars}, None, level, threads)


@at_every_level
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_against_float64(
    combination: tuple[torch.dtype, ...], weight_decay: float, level: str, rng: torch.Generator
) -> None:
    """Fault: a wrong tail or conversion; weight decay in the sum alone; a gradient overwritten (both DeepSpeed)."""
    for n in SIZES:
        t = made(n, combination, rng, positive=True)
        before = cloned(t)
        create_adagrad(3, 0.01, 1e-10, weight_decay, False)
        assert adagrad_update(3, 1, 0.01, 1e-10, weight_decay, *t) == 0
        destroy_adagrad(3)
        ref = adagrad(*before, lr=0.01, weight_decay=weight_decay)
        assert_close(f"p[{n}]", t[0], ref.p, ref.p_scale)
        assert_close("v", t[2], ref.m, ref.m_scale)
        assert_bits("g", t[1], before[1])


def test_the_comparison_sees_broken_kernels(rng: torch.Generator) -> None:
    """Fault: a bound that DeepSpeed's own formula (decay in the sum alone) passes."""
    p, g, v = before = made(4099, (F32, F32, F32), rng, positive=True)
    ref = adagrad(*before, **SCALARS)
    right = ref.p.float()
    assert_close("p", right, ref.p, ref.p_scale)
    decayed = (v.double() + (g.double() + 0.1 * p.double()) ** 2).sqrt()
    deepspeeds = (p.double() - 0.01 * g.double() / decayed).float()
    for broken in (p, 2 * p - right, deepspeeds, right.flip(0)):
        with pytest.raises(Mismatch):
            assert_close("p", broken, ref.p, ref.p_scale)


@at_every_level
def test_special_values_propagate(level: str) -> None:
    """Fault: a masked lane or a fast instruction that loses NaN, infinity or a denormal. 0 / (0 + 0) is NaN."""
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 1e-39, 1e18])
    p, g, v = (x.contiguous() for x in torch.cartesian_prod(values, values, values.abs()).unbind(1))
    for eps in (1e-10, 0.0):
        t = [p.clone(), g.clone(), v.clone()]
        step([t], level, weight_decay=0.0, eps=eps)
        ref = adagrad(p, g, v, lr=0.01, eps=eps)
        small = (ref.m < 1e-37) & (ref.m > 0)  # squares that leave float32 at its lower end
        assert_close("p", t[0][~small], ref.p[~small], ref.p_scale[~small])
        assert_close("v", t[2], ref.m, ref.m_scale)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_wide_levels_give_equal_bits(combination: tuple[torch.dtype, ...], rng: torch.Generator) -> None:
    """Fault: results that depend on the CPU a job landed on."""
    if "avx512" not in simd_levels("cpu_adagrad"):
        pytest.skip("this CPU has no avx512")
    before = made(4099, combination, rng, positive=True)
    results = [cloned(before) for _ in range(2)]
    for t, level in zip(results, ("avx2", "avx512"), strict=True):
        step([t], level, grad_scale=3.0)
    for name, a, b in zip("pgv", *results, strict=True):
        assert_bits(name, a, b)


def test_threads_and_tensor_count_change_nothing(rng: torch.Generator) -> None:
    """Fault: a chunk border that moves with the number of threads, and results with it."""
    sizes = [5, 0, 16384, 16383, 16385, 1, 70_001, 3, 200_003]
    before = [made(n, (F32, F32, F32), rng, positive=True) for n in sizes]
    alone = [cloned(t) for t in before]
    for t in alone:
        step([t])
    for threads in (1, 2, 64):
        together = [cloned(t) for t in before]
        step(together, threads=threads)
        for a, b in zip(alone, together, strict=True):
            for name, x, y in zip("pgv", a, b, strict=True):
                assert_bits(name, y, x)


def test_copy_is_the_rounded_parameter(rng: torch.Generator) -> None:
    """Fault: a copy of the parameters of before, or rounded another way."""
    t = made(4099, (F32, F32, F32), rng, positive=True)
    copy = torch.zeros(4099, dtype=BF16)
    step([[*t, copy]])
    assert_bits("copy", copy, t[0].to(BF16))


# ---- sparse gradients -------------------------------------------------------------------------------------------


def sparse(shape: tuple[int, ...], rows: list[int], rng: torch.Generator, dtype: torch.dtype = F32) -> Tensor:
    values = torch.randn(len(rows), *shape[1:], generator=rng).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sparse_rows_equal_dense_rows(dtype: torch.dtype, weight_decay: float, rng: torch.Generator) -> None:
    """Fault: rows named twice counted once, rows not named touched, or another result than of the dense gradient."""
    start = torch.randn(50, 33, generator=rng).to(dtype)
    a, b = Parameter(start.clone()), Parameter(start.clone())
    oa = DeepSpeedCPUAdagrad([a], lr=0.1, weight_decay=weight_decay)
    ob = DeepSpeedCPUAdagrad([b], lr=0.1, weight_decay=weight_decay)
    for rows in ([3, 7, 3, 49], [0], [7, 8]):
        a.grad = sparse((50, 33), rows, rng, dtype)
        given = a.grad.clone()
        before = b.detach().clone()
        b.grad = a.grad.coalesce().to_dense()
        oa.step()
        ob.step()
        named = torch.tensor(sorted(set(rows)))
        rest = torch.tensor([i for i in range(50) if i not in rows])
        assert_bits("rows", a[named], b[named])
        assert_bits("sum of squares", oa.state[a]["exp_avg_sq"][named], ob.state[b]["exp_avg_sq"][named])
        assert_bits("other rows", a[rest], before[rest])
        b.data.copy_(a)
        ob.state[b]["exp_avg_sq"].copy_(oa.state[a]["exp_avg_sq"])
        assert torch.equal(a.grad.coalesce().values(), given.coalesce().values())
    assert int(oa.state[a]["step"]) == 3


def test_sparse_equals_torch(rng: torch.Generator) -> None:
    """Fault: another formula than torch.optim.Adagrad's, over steps; indices of one and two dimensions."""
    start = torch.randn(20, 6, generator=rng)
    a, b = Parameter(start.clone()), Parameter(start.double())
    ours, theirs = DeepSpeedCPUAdagrad([a], lr=0.1), torch.optim.Adagrad([b], lr=0.1)
    for i in range(6):
        if i % 3 == 2:
            a.grad = torch.randn(20, 6, generator=rng)
        elif i % 3 == 1:
            at = torch.tensor([[1, 4, 1], [2, 5, 0]])
            a.grad = torch.sparse_coo_tensor(at, torch.randn(3, generator=rng), (20, 6))
        else:
            a.grad = sparse((20, 6), [1, 5, 5], rng)
        b.grad = a.grad.double()
        ours.step()
        theirs.step()
    assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-6)
    assert int(ours.state[a]["step"]) == 6


def test_sparse_embedding_trains(rng: torch.Generator) -> None:
    """Fault: a real layer's gradient (uncoalesced, of rows) refused or lost."""
    table = torch.nn.Embedding(30, 8, sparse=True)
    optimizer = DeepSpeedCPUAdagrad(table.parameters(), lr=0.5)
    words = torch.randint(0, 30, (64,), generator=rng)
    first = last = 0.0
    for i in range(30):
        optimizer.zero_grad()
        loss = (table(words) - 1).square().mean()
        loss.backward()
        optimizer.step()
        first, last = (loss.item(), loss.item()) if i == 0 else (first, loss.item())
    assert last < 0.01 * first


def test_sparse_refusals(rng: torch.Generator) -> None:
    """Fault: memory of another layout, dtype or size written as if it were rows."""
    p = Parameter(torch.zeros(6, 4))
    optimizer = DeepSpeedCPUAdagrad([p])
    p.data = torch.zeros(4, 6).t()
    p.grad = sparse((6, 4), [1], rng)
    with pytest.raises(TensorError, match="strides"):
        optimizer.step()
    wide = Parameter(torch.zeros(6, 4, dtype=torch.float64))
    wide.grad = sparse((6, 4), [1], rng, torch.float64)
    with pytest.raises(DtypeError):
        DeepSpeedCPUAdagrad([wide], fp32_optimizer_states=False).step()
    empty = Parameter(torch.ones(6, 4))
    empty.grad = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (6, 4))
    DeepSpeedCPUAdagrad([empty]).step()
    assert bool((empty == 1).all())


def test_refusals(rng: torch.Generator) -> None:
    """Fault: a wrong argument ends the process (DeepSpeed: an unknown id), or is taken and nothing is updated."""
    p, g, v = made(12, (F32, F32, F32), rng, positive=True)
    with pytest.raises(UsageError, match="optimizer id 99 is unknown"):
        adagrad_update(99, 1, 0.1, 1e-10, 0.0, p, g, v)
    create_adagrad(5, 0.1, 1e-10, 0.0, True)
    for error, args in (
        (UsageError, (5, 0, 0.1, 1e-10, 0.0, p, g, v)),
        (UsageError, (5, 1, 0.1, -1.0, 0.0, p, g, v)),
        (TensorError, (5, 1, 0.1, 1e-10, 0.0, p, g, v[:3])),
        (TensorError, (5, 1, 0.1, 1e-10, 0.0, torch.zeros(24)[::2], g, v)),
        (DtypeError, (5, 1, 0.1, 1e-10, 0.0, p.double(), g, v)),
    ):
        with pytest.raises(error):
            adagrad_update(*args)
    destroy_adagrad(5)
    with pytest.raises(UsageError, match="amsgrad"):
        DeepSpeedCPUAdagrad([Parameter(p)], amsgrad=True)
