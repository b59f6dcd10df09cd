"""cpu_lion against the float64 reference: dtypes x SIMD levels x sizes, and what must not change the bits."""

from __future__ import annotations

import pytest
import torch
from compare import Mismatch, assert_bits, assert_close
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from raw import BF16, COMBINATIONS, F16, F32, combination_id
from raw_tables import cloned, made, step_tables
from reference_optimizers import lion
from torch import Tensor

from deepspeed_ops.cpu_lion import create_lion, destroy_lion, lion_update
from deepspeed_ops.cpu_op import simd_levels
from deepspeed_ops.lion_step import CpuLionStep

LEVELS = ("scalar", "avx2", "avx512")
at_every_level = pytest.mark.parametrize("level", LEVELS, indirect=True)
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 1023, 1024, 1025, 100_003)
SCALARS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}


def step(tensors: list[list[Tensor]], level: str = "", threads: int = 1, **scalars: float) -> int:
    return step_tables(CpuLionStep, tensors, {**SCALARS, **scalars}, None, level, threads)


def check(got: list[Tensor], before: list[Tensor], **scalars: float) -> None:
    ref = lion(*before, **{**SCALARS, **scalars})
    assert_close(f"p[{len(got[0])}]", got[0], ref.p, ref.p_scale)
    assert_close("m", got[2], ref.m, ref.m_scale)


@at_every_level
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_against_float64(
    combination: tuple[torch.dtype, ...], weight_decay: float, level: str, rng: torch.Generator
) -> None:
    """Fault: a wrong tail, a wrong conversion, a formula of one level or of one dtype."""
    for n in SIZES:
        t = made(n, combination, rng)
        before = cloned(t)
        create_lion(3, 0.01, 0.9, 0.99, weight_decay, False)
        assert lion_update(3, 1, 0.01, 0.9, 0.99, weight_decay, *t) == 0
        destroy_lion(3)
        check(t, before, weight_decay=weight_decay)
        assert_bits("g", t[1], before[1])


def test_the_comparison_sees_broken_kernels(rng: torch.Generator) -> None:
    """Fault: a bound that a kernel which does nothing, or flips the sign, or forgets the decay, passes."""
    before = made(4099, (F32, F32, F32), rng)
    ref = lion(*before, **SCALARS)
    right = ref.p.float()
    assert_close("p", right, ref.p, ref.p_scale)
    no_decay = lion(*before, **{**SCALARS, "weight_decay": 0.0}).p.float()
    swapped = lion(*before, **{**SCALARS, "beta1": 0.99, "beta2": 0.9})
    for broken in (before[0], 2 * before[0] - right, no_decay, swapped.p.float(), right.flip(0)):
        with pytest.raises(Mismatch):
            assert_close("p", broken, ref.p, ref.p_scale)
    with pytest.raises(Mismatch):
        assert_close("m", swapped.m.float(), ref.m, ref.m_scale)


@at_every_level
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_zero_update_moves_nothing(dtype: torch.dtype, level: str) -> None:
    """Fault: copysign(lr, 0) moves elements without gradient by lr (DeepSpeed: on CPU one way, on GPU the other)."""
    p = torch.tensor([1.5, -2.0, 0.0, -0.0] * 9, dtype=dtype)
    for zero in (0.0, -0.0):
        t = [p.clone(), torch.full_like(p, zero), torch.full_like(p, zero, dtype=F32)]
        step([t], level, weight_decay=0.0)
        assert_bits("p", t[0], p)


@at_every_level
def test_special_values_propagate(level: str) -> None:
    """Fault: a comparison that turns NaN into a step, or an infinite parameter into NaN."""
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 1e-39, -1e-45, 3e38])
    p, g, m = (x.contiguous() for x in torch.cartesian_prod(values, values, values).unbind(1))
    for weight_decay in (0.0, 0.1):
        t = [p.clone(), g.clone(), m.clone()]
        step([t], level, weight_decay=weight_decay)
        ref = lion(p, g, m, **{**SCALARS, "weight_decay": weight_decay})
        assert_close("p", t[0], ref.p, ref.p_scale)
        assert_close("m", t[2], ref.m, ref.m_scale)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_wide_levels_give_equal_bits(combination: tuple[torch.dtype, ...], rng: torch.Generator) -> None:
    """Fault: results that depend on the CPU a job landed on."""
    if "avx512" not in simd_levels("cpu_lion"):
        pytest.skip("this CPU has no avx512")
    before = made(4099, combination, rng)
    for at, value in enumerate((float("nan"), float("inf"), 1e-40, -0.0, 65504.0)):
        for i, x in enumerate(before):
            x[10 * at + i] = value
    results = [cloned(before) for _ in range(2)]
    for t, level in zip(results, ("avx2", "avx512"), strict=True):
        step([t], level, grad_scale=3.0)
    for name, a, b in zip("pgm", *results, strict=True):
        assert_bits(name, a, b)


def test_threads_and_tensor_count_change_nothing(rng: torch.Generator) -> None:
    """Fault: a chunk border that moves with the number of threads, and results with it."""
    sizes = [5, 0, 16384, 16383, 16385, 1, 70_001, 3, 0, 200_003]
    before = [made(n, (F32, F32, F32), rng) for n in sizes]
    alone = [cloned(t) for t in before]
    for t in alone:
        step([t])
    for threads in (1, 2, 3, 64):
        together = [cloned(t) for t in before]
        step(together, threads=threads)
        for a, b in zip(alone, together, strict=True):
            for name, x, y in zip("pgm", a, b, strict=True):
                assert_bits(name, y, x)


@at_every_level
@pytest.mark.parametrize("copy_dtype", [F16, BF16], ids=str)
def test_copy_is_the_rounded_parameter(copy_dtype: torch.dtype, level: str, rng: torch.Generator) -> None:
    """Fault: a copy of the parameters of before, of some blocks only, or rounded another way."""
    for n in (1, 17, 2047, 2048, 2049, 40_003):
        t = made(n, (F32, F32, F32), rng)
        alone = cloned(t)
        step([alone], level)
        copy = torch.zeros(n, dtype=copy_dtype)
        step([[*t, copy]], level, threads=2)
        assert_bits("p", t[0], alone[0])
        assert_bits("copy", copy, t[0].to(copy_dtype))


def test_refusals(rng: torch.Generator) -> None:
    """Fault: a wrong argument ends the process (DeepSpeed: an unknown id), or is taken and nothing is updated."""
    p, g, m = made(12, (F32, F32, F32), rng)
    with pytest.raises(UsageError, match="optimizer id 99 is unknown"):
        lion_update(99, 1, 0.1, 0.9, 0.99, 0.0, p, g, m)
    create_lion(5, 0.1, 0.9, 0.99, 0.0, True)
    grid = torch.zeros(4, 6)[:, ::2]
    for error, args in (
        (UsageError, (5, 0, 0.1, 0.9, 0.99, 0.0, p, g, m)),
        (UsageError, (5, 1, -0.1, 0.9, 0.99, 0.0, p, g, m)),
        (UsageError, (5, 1, 0.1, 1.0, 0.99, 0.0, p, g, m)),
        (TensorError, (5, 1, 0.1, 0.9, 0.99, 0.0, grid, torch.zeros(4, 3), torch.zeros(4, 3))),
        (TensorError, (5, 1, 0.1, 0.9, 0.99, 0.0, p, g[:5], m)),
        (TensorError, (5, 1, 0.1, 0.9, 0.99, 0.0, p, g, p)),
        (DtypeError, (5, 1, 0.1, 0.9, 0.99, 0.0, p.double(), g.double(), m)),
        (TypeError, (5, 1, 0.1, 0.9, 0.99, 0.0, p.half(), g.bfloat16(), m)),
    ):
        with pytest.raises(error):
            lion_update(*args)
    destroy_lion(5)
    destroy_lion(5)
