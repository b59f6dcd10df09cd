"""fused_adam, fused_lion, fused_lamb, clip_grad_norm without a GPU: kernels, structures, order of launches on the CPU
(emulator.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bits, assert_close
from deepspeed_ops.op_builder.errors import DtypeError, UsageError
from emulator import EmulatedLauncher, build, count_on_device, pretend_gpu
from raw import BF16, F16, F32
from reference_optimizers import LambHyper, lamb
from torch import Tensor

from deepspeed_ops import adam_scalars, adam_step, clip_grad_norm, lamb_step, lion_step
from deepspeed_ops.step_inputs import Amp

F64 = torch.float64
SIZES = (1, 0, 3, 4, 5, 511, 512, 513, 1027, 4096, 0, 2)
# Parameter, gradient, state.
COMBINATIONS = [(F32, F32, F32), (F16, F16, F16), (BF16, F32, F32), (F32, F16, F32), (F32, BF16, BF16), (F64, F64, F64)]
combinations = pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(str(d)[6:] for d in c))
counting = pytest.mark.parametrize("where", ["host", "device"])
Launchers = Callable[[str], EmulatedLauncher]


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    known: dict[str, EmulatedLauncher] = {}

    def get(op: str) -> EmulatedLauncher:
        if op not in known:
            known[op] = EmulatedLauncher(build(op, tmp_path_factory.mktemp(op)))
        return known[op]

    return get


@pytest.fixture(autouse=True)
def gpu(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> Launchers:
    pretend_gpu(monkeypatch, launchers)
    clip_grad_norm._plans.clear()
    return launchers


def lists(combination: tuple[torch.dtype, ...], moments: int, rng: torch.Generator) -> list[list[Any]]:
    """p, g and moments; the fourth tensor starts one element off its alignment, the sixth has no gradient."""

    def one(n: int, dtype: torch.dtype, odd: bool, positive: bool) -> Tensor:
        draw = torch.rand if positive else torch.randn
        x = torch.zeros(n + 1, dtype=dtype)[1:] if odd else torch.zeros(n, dtype=dtype)
        return x.copy_(draw(n, generator=rng))

    pd, gd, sd = combination
    kinds = [(pd, False), (gd, False), *((sd, i == 1) for i in range(moments))]
    made = [[one(n, dtype, i == 3, positive) for i, n in enumerate(SIZES)] for dtype, positive in kinds]
    made[1][5] = None  # type: ignore[call-overload]
    return made


def copied(some: list[list[Any]]) -> list[list[Any]]:
    """The same memory layout (offsets too)."""

    def one(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        room = torch.zeros(x.numel() + x.storage_offset(), dtype=x.dtype)
        return room[x.storage_offset() :].copy_(x)

    return [[one(x) for x in xs] for xs in some]


def run(step: Any, some: list[list[Any]], counters: Tensor, scalars: Any, amp: Amp | None = None) -> None:
    step.launch(step.look(some), counters, scalars, None, amp or Amp())


def compare(some: list[list[Any]], others: list[list[Any]]) -> None:
    for row, (xs, ys) in enumerate(zip(some, others, strict=True)):
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if x is not None:
                assert_bits(f"list {row} tensor {i}", x, y)


# ---- Adam and Lion: the bits of the CPU ops ---------------------------------------------------------------------


@counting
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@combinations
def test_adam(
    combination: tuple[torch.dtype, ...],
    adamw: bool,
    where: str,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: a skeleton shared by all kernels that changes what fused_adam computes."""
    scalars = adam_scalars.AdamScalars(0.01, 0.9, 0.999, 1e-8, 0.1, adamw, True)
    mine = lists(combination, 2, rng)
    others = copied(mine)
    step = adam_step.GpuStep("fused_adam", mine)
    if where == "device":
        count_on_device(step, monkeypatch)
    counters = [torch.arange(len(SIZES)) // 4 for _ in range(2)]
    if combination[0] is F64:
        run(step, mine, counters[0], scalars)
        check_wide_adam(mine, others, counters[0], adamw)
        return
    theirs = adam_step.CpuStep("cpu_adam", others) if combination[1] is not BF16 or combination[2] is F32 else None
    for _ in range(3):
        run(step, mine, counters[0], scalars)
        if theirs is not None:
            run(theirs, others, counters[1], scalars)
    if theirs is not None:
        assert torch.equal(*counters)
        compare(mine, others)


def check_wide_adam(mine: list[list[Any]], before: list[list[Any]], counters: Tensor, adamw: bool) -> None:
    for i, (p, g, m, v) in enumerate(zip(*before, strict=True)):
        if g is None:
            assert_bits("p", mine[0][i], p)
        if g is None or not g.numel():
            continue
        theirs = (torch.optim.AdamW if adamw else torch.optim.Adam)([q := p.clone()], lr=0.01, weight_decay=0.1)
        theirs.state[q] = {"step": torch.tensor(float(counters[i] - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        q.grad = g
        theirs.step()
        assert torch.allclose(mine[0][i], q, rtol=1e-14, atol=1e-15)


@counting
@combinations
def test_lion(
    combination: tuple[torch.dtype, ...], where: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a wrong tail, row or scalar; another sign of zero than on the CPU."""
    scalars = lion_step.LionScalars(0.01, 0.9, 0.99, 0.1)
    mine = lists(combination, 1, rng)
    mine[1][9][:100], mine[2][9][:100] = 0.0, 0.0
    others = copied(mine)
    step = lion_step.GpuLionStep("fused_lion", mine)
    if where == "device":
        count_on_device(step, monkeypatch)
    counters = [torch.zeros(len(SIZES), dtype=torch.int64) for _ in range(2)]
    if combination[0] is F64 or combination == (F32, BF16, BF16):
        run(step, mine, counters[0], scalars)
        for i, (p, g, m) in enumerate(zip(*others, strict=True)):
            if g is not None:
                c = 0.9 * m.double() + 0.1 * g.double()
                want = p.double() - 0.01 * (c.sign() + 0.1 * p.double())
                unsure = c.abs() < 1e-9
                assert torch.allclose(mine[0][i].double()[~unsure | (c == 0)], want[~unsure | (c == 0)], atol=1e-6)
        return
    theirs = lion_step.CpuLionStep("cpu_lion", others)
    for _ in range(3):
        run(step, mine, counters[0], scalars)
        run(theirs, others, counters[1], scalars)
    assert torch.equal(*counters) and all(
        int(c) == 3 for c, n, i in zip(counters[0], SIZES, range(99), strict=False) if n and i != 5
    )
    compare(mine, others)


def test_lion_divides_by_the_scale_and_skips_where_told(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: GradScaler's scale ignored, or a step with infinities taken or counted."""
    scalars = lion_step.LionScalars(0.01, 0.9, 0.99, 0.1)
    mine = lists((F32, F32, F32), 1, rng)
    others = copied(mine)
    before = copied(mine)
    step, theirs = lion_step.GpuLionStep("fused_lion", mine), lion_step.CpuLionStep("cpu_lion", others)
    count_on_device(step, monkeypatch)
    counters = torch.zeros(len(SIZES), dtype=torch.int64)
    found = torch.ones(())
    monkeypatch.undo()
    pretend_gpu(monkeypatch, lambda op: step.launcher)
    run(step, mine, counters, scalars, Amp(None, found))
    compare(mine, before)
    scale = torch.tensor(1024.0)
    for amp in (Amp(scale, torch.zeros(())), Amp(torch.tensor(3.0), None)):
        run(step, mine, counters, scalars, amp)
        run(theirs, others, counters.clone(), scalars, amp)
    compare(mine, others)


# ---- LAMB: the float64 formula ----------------------------------------------------------------------------------


def check_lamb(mine: list[list[Any]], before: list[list[Any]], ratios: Tensor, steps: Tensor, h: LambHyper) -> None:
    wide = before[0][0].dtype is F64
    eps = float(torch.finfo(F64 if wide else F32).eps)
    for i, (p, g, m, v, *_) in enumerate(zip(*before, strict=True)):
        if g is None:
            assert_bits("p without gradient", mine[0][i], p)
        if g is None or not g.numel():
            continue
        ref = lamb(p, g, m, v, int(steps[i]), h)
        assert_close(f"p {i}", mine[0][i], ref.p, ref.p_scale, eps=eps)
        assert_close(f"m {i}", mine[2][i], ref.m, ref.m_scale, eps=eps)
        assert_close(f"v {i}", mine[3][i], ref.v, ref.v_scale, eps=eps)
        assert abs(float(ratios[i]) - ref.ratio) <= 1.2e-7 * (ref.ratio_scale + 1) * ref.ratio


@counting
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@combinations
def test_lamb(
    combination: tuple[torch.dtype, ...],
    inside: bool,
    where: str,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: a norm over the wrong chunks, a ratio applied to the neighbour, a second pass that sees other moments."""
    h = LambHyper(weight_decay=0.1, eps_inside_sqrt=inside, grad_scale=4.0)
    scalars = lamb_step.checked("x", h.lr, (h.beta1, h.beta2), h.eps, 0.1, 10.0, 0.01, inside, True)
    mine = lists(combination, 2, rng)
    step = lamb_step.GpuLambStep("fused_lamb", mine)
    if where == "device":
        count_on_device(step, monkeypatch)
    counters = torch.arange(len(SIZES)) // 4
    for _ in range(2):
        before = copied(mine)
        run(step, mine, counters, scalars, Amp(torch.tensor(4.0)))
        check_lamb(mine, before, step.ratios, counters, h)


def test_lamb_over_many_segments(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: sums of a tensor's second segment lost or given to the next tensor; the last, shorter one misread."""
    from deepspeed_ops import device_table

    monkeypatch.setattr(device_table, "SEGMENT", 3)  # chunks: the first tensor has 4 segments, then 1, 0, 2
    sizes = (5000, 100, 0, 2049)
    mine = [[torch.randn(n, generator=rng) * (i + 1) for i, n in enumerate(sizes)] for _ in range(3)]
    mine.append([torch.rand(n, generator=rng) for n in sizes])
    before = copied(mine)
    step = lamb_step.GpuLambStep("fused_lamb", mine)
    pairs, first = step.table.segments()
    assert first.tolist() == [0, 4, 5, 5, 7]
    assert pairs.tolist() == [[0, 3], [3, 3], [6, 3], [9, 1], [10, 1], [11, 3], [14, 2]]
    counters = torch.zeros(4, dtype=torch.int64)
    run(step, mine, counters, lamb_step.checked("x", 0.01, (0.9, 0.999), 1e-6, 0.0, 10.0, 0.01, False, True))
    check_lamb(mine, before, step.ratios, counters, LambHyper())


@pytest.mark.parametrize("copy_dtype", [F16, BF16, F32], ids=str)
def test_lamb_copies(copy_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Fault: a low-precision copy of the parameters of before, or one written where none was asked for."""
    mine = lists((F32, F16, F32), 2, rng)
    copies: list[Any] = [torch.full((n,), 7.0, dtype=copy_dtype) for n in SIZES]
    copies[7] = None
    some = [*mine, copies]
    step = lamb_step.GpuLambStep("fused_lamb", some)
    scalars = lamb_step.checked("x", 0.01, (0.9, 0.999), 1e-6, 0.1, 10.0, 0.01, False, False)
    run(step, some, torch.zeros(len(SIZES), dtype=torch.int64), scalars)
    for i, copy in enumerate(copies):
        if i == 5:
            assert bool((copy == 7.0).all())
        elif copy is not None:
            assert_bits(f"copy {i}", copy, mine[0][i].to(copy_dtype))


def test_lamb_ratio_of_zero_and_clamped(rng: torch.Generator) -> None:
    """Fault: 0 / 0 for parameters that start at zero, or a ratio outside its limits."""
    p = [torch.zeros(700), torch.full((700,), 1e6), torch.full((700,), 1e-9), torch.full((3,), float("nan"))]
    g = [torch.randn(x.numel(), generator=rng) for x in p]
    some = [p, g, [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p]]
    step = lamb_step.GpuLambStep("fused_lamb", some)
    scalars = lamb_step.checked("x", 0.01, (0.9, 0.999), 1e-6, 0.0, 2.0, 0.5, False, True)
    run(step, some, torch.zeros(4, dtype=torch.int64), scalars)
    assert step.ratios[:3].tolist() == [1.0, 2.0, 0.5] and bool(step.ratios[3].isnan())
    assert bool(p[0].any())


def test_lamb_skips_where_told(rng: torch.Generator) -> None:
    """Fault: pass 2 applies the update of another step where pass 1 was skipped."""
    mine = lists((F32, F32, F32), 2, rng)
    before = copied(mine)
    step = lamb_step.GpuLambStep("fused_lamb", mine)
    scalars = lamb_step.checked("x", 0.01, (0.9, 0.999), 1e-6, 0.1, 10.0, 0.01, False, True)
    for amp, flag in ((Amp(None, torch.ones(())), None), (Amp(), torch.ones(1, dtype=torch.int32))):
        step.launch(step.look(mine), torch.zeros(len(SIZES), dtype=torch.int64), scalars, None, amp, flag)
        compare(mine, before)
    assert bool((step.ratios == 1).all())


def test_float64_mixes_with_nothing(rng: torch.Generator) -> None:
    """Fault: eight bytes read where four were written."""
    mine = lists((F64, F64, F64), 2, rng)
    mine[2] = [x.float() for x in mine[2]]
    with pytest.raises(DtypeError, match="float64 does not mix"):
        lamb_step.GpuLambStep("fused_lamb", mine)


def test_capture_needs_device_counters(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a captured step whose replays repeat the scalars of the first."""
    mine = lists((F32, F32, F32), 2, rng)
    step = lamb_step.GpuLambStep("fused_lamb", mine)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scalars = lamb_step.checked("x", 0.01, (0.9, 0.999), 1e-6, 0.1, 10.0, 0.01, False, True)
    with pytest.raises(UsageError, match=r"FusedLamb\(\.\.\., capturable=True\)"):
        run(step, mine, torch.zeros(len(SIZES), dtype=torch.int64), scalars)


# ---- norm and scaling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [2, 2048])
def test_norm_and_clip(segment: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a chunk counted twice or not at all, a format's gradients left unscaled, small gradients written."""
    monkeypatch.setattr(clip_grad_norm, "SEGMENT", segment)
    for dtypes in ((F32,), (F16,), (F64,), (F32, F16, BF16), (F32, F64)):
        grads = [torch.randn(n, generator=rng).to(d) for n in SIZES for d in dtypes]
        want = torch.cat([g.double() for g in grads]).norm()
        plan = clip_grad_norm._Plan(grads)
        before = [g.clone() for g in grads]
        result = plan.norm(grads, 1e9)
        assert abs(float(result[0]) - float(want)) <= 2e-6 * float(want)
        plan.scale(result)
        for g, old in zip(grads, before, strict=True):
            assert_bits("small gradients", g, old)
        limit = float(want) / 3
        result = plan.norm(grads, limit)
        plan.scale(result)
        assert abs(float(result[1]) - limit / (float(want) + 1e-6)) < 2e-6
        for g, old in zip(grads, before, strict=True):
            exact = old.double() * float(result[1])
            info = torch.finfo(g.dtype)
            allowed = info.eps * exact.abs() + info.smallest_normal * info.eps + 6e-8 * exact.abs()
            assert bool(((g.double() - exact).abs() <= allowed).all()), g.dtype


def test_norm_of_nan_and_infinity() -> None:
    """Fault: a comparison that takes a NaN for small enough."""
    for value, first in ((float("inf"), 0.0), (float("nan"), float("nan"))):
        g = [torch.tensor([1.0, value]), torch.ones(3)]
        plan = clip_grad_norm._Plan(g)
        plan.scale(plan.norm(g, 1.0))
        assert torch.equal(g[1], torch.full((3,), first)) or bool(g[1].isnan().all()) is (first != first)
        assert bool(g[0][1].isnan())
