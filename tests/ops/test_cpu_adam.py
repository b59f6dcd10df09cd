"""cpu_adam against the float64 reference: dtypes x modes x SIMD levels x sizes, and what must not change the bits."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bits, assert_close
from raw import BF16, COMBINATIONS, F16, F32, Tensors, combination_id, copies, random_tensors, step_many
from reference import Hyper, adam, adam_eager

from deepspeed_ops.cpu_adam import adam_update, create_adam, destroy_adam, simd_level, simd_levels

LEVELS = ("scalar", "avx2", "avx512")
at_every_level = pytest.mark.parametrize("level", LEVELS, indirect=True)
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 1023, 1024, 1025, 100_003)
HUGE = 2**20 + 3


def step_one(t: Tensors, step: int, h: Hyper) -> None:
    """One step through the public functions under DeepSpeed's names."""
    create_adam(7, h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.adamw, False)
    p, g, m, v = t
    assert adam_update(7, step, h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.bias_correction, p, g, m, v) == 0
    destroy_adam(7)


def check(t: Tensors, before: Tensors, step: int, h: Hyper) -> None:
    ref = adam(*before, step, h)
    for name, got in zip("pmv", (t[0], t[2], t[3]), strict=True):
        assert_close(f"{name}[{len(got)}]", got, getattr(ref, name), getattr(ref, name + "_scale"))


@at_every_level
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "plain"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_against_float64(
    combination: tuple[torch.dtype, ...], bias_correction: bool, adamw: bool, level: str, rng: torch.Generator
) -> None:
    """Fault: a wrong tail, a wrong conversion, a formula of one level or of one dtype."""
    h = Hyper(weight_decay=0.1, adamw=adamw, bias_correction=bias_correction)
    for n in (*SIZES, HUGE) if adamw and bias_correction else SIZES:
        t = random_tensors(n, combination, rng)
        before = copies(t)
        step_one(t, 3, h)
        check(t, before, 3, h)
        assert_bits("g", t[1], before[1])


@at_every_level
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] is not F32], ids=combination_id)
def test_half_precision_beats_eager(combination: tuple[torch.dtype, ...], level: str, rng: torch.Generator) -> None:
    """Fault: arithmetic in the storage dtype, or results rounded more than once."""
    h = Hyper(weight_decay=0.1)
    before = random_tensors(10_007, combination, rng)
    t = copies(before)
    step_one(t, 3, h)
    ref, eager = adam(*before, 3, h), adam_eager(*before, 3, h)
    for name, ours, theirs in zip("pmv", (t[0], t[2], t[3]), eager, strict=True):
        want = getattr(ref, name)
        error, their_error = ((x.double() - want).abs().max() for x in (ours, theirs))
        assert error <= 2 * their_error, f"{name}: {float(error)} against {float(their_error)}"


@at_every_level
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 1023, 1024, 1025, HUGE])
def test_odd_sizes_row(n: int, dtype: torch.dtype, level: str) -> None:
    """Fault: half precision at odd sizes (DeepSpeed#1983, #679). Three steps at element offset 1 between guards."""
    guard = 16

    def guarded(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        room = torch.full((n + 1 + guard,), 77.0, dtype=kind)
        room[1 : n + 1] = values.to(kind)
        return room, room[1 : n + 1]

    rooms = [guarded(torch.linspace(0, 1, n), dtype), guarded(torch.zeros(n), F32), guarded(torch.zeros(n), F32)]
    (_, p), (_, m), (_, v) = rooms
    if n == 1:
        p.fill_(0.0)
    wide = [p.double(), torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)]
    for s in (1, 2, 3):
        room_g, g = guarded(torch.linspace(-1, 1, n) * s, dtype)
        step_one((p, g, m, v), s, Hyper(lr=0.01))
        ref = adam(wide[0], g, wide[1], wide[2], s, Hyper(lr=0.01))
        wide = [ref.p, ref.m, ref.v]
        assert bool((room_g[[0, *range(n + 1, n + 1 + guard)]] == 77).all())
    # The row's values for AdamW without decay; three roundings of the storage dtype at most, plus float32's own.
    right = 0.97076817 if n > 1 else 0.02923183
    assert abs(float(p[-1]) - right) <= 3 * float(torch.finfo(dtype).eps) * right
    assert abs(float(wide[0][-1]) - right) <= 2e-7 + 3 * float(torch.finfo(dtype).eps) * (dtype is not F32)
    for room, _ in rooms:
        assert float(room[0]) == 77 and bool((room[n + 1 :] == 77).all()), "guard elements were written"


@at_every_level
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_any_byte_alignment(combination: tuple[torch.dtype, ...], level: str, rng: torch.Generator) -> None:
    """Fault: an aligned load of an address that is not, or a store past either end."""
    n, h = 261, Hyper(weight_decay=0.1)
    before = random_tensors(n, combination, rng)
    expected = copies(before)
    step_many([expected], [2], h, level)
    for offset in (1, 2, 3, 5, 31):
        rooms = []
        for x in before:
            room = torch.full((x.numel() * x.element_size() + 96,), 0xA5, dtype=torch.uint8)
            room[32 + offset : 32 + offset + x.numel() * x.element_size()] = x.view(torch.uint8)
            rooms.append(room)
        views = tuple(
            torch.frombuffer(room.numpy(), dtype=x.dtype, count=n, offset=32 + offset)
            for room, x in zip(rooms, before, strict=True)
        )
        step_many([views], [2], h, level)  # type: ignore[list-item]
        for name, got, want in zip("pgmv", views, expected, strict=True):
            assert_bits(f"{name} at +{offset}", got.clone(), want)
        for room, x in zip(rooms, before, strict=True):
            end = 32 + offset + x.numel() * x.element_size()
            assert bool((room[: 32 + offset] == 0xA5).all()) and bool((room[end:] == 0xA5).all())


# ---- levels -----------------------------------------------------------------------------------------------------


@at_every_level
def test_forced_level_is_the_one_that_runs(level: str, rng: torch.Generator) -> None:
    """Fault: the variable is read and the best level runs all the same.

    Only the scalar level rounds twice in a fused multiply-add, so over many elements its bits differ from AVX2's; the
    two wide levels are told apart by name (their bits are equal, next test; qemu without AVX-512 runs the other one).
    """
    before = random_tensors(10_007, (F32, F32, F32), rng)
    got, scalar, wide = copies(before), copies(before), copies(before)
    step_one(got, 3, Hyper(weight_decay=0.1))
    step_many([scalar], [3], Hyper(weight_decay=0.1), "scalar")
    assert_bits("p", got[0], scalar[0]) if level == "scalar" else None
    step_many([wide], [3], Hyper(weight_decay=0.1), simd_levels()[0])
    if level != "scalar":
        assert not torch.equal(got[0], scalar[0])
        assert_bits("p", got[0], wide[0])
    elif simd_levels()[0] != "scalar":
        assert not torch.equal(got[0], wide[0])
    assert simd_level() == level


@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
def test_avx2_and_avx512_give_equal_bits(
    adamw: bool, combination: tuple[torch.dtype, ...], rng: torch.Generator
) -> None:
    """Fault: results that depend on the CPU a job landed on."""
    if "avx512" not in simd_levels():
        pytest.skip("this CPU has no avx512")
    before = random_tensors(4099, combination, rng)
    for at, value in enumerate((float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 65504.0)):
        for i, x in enumerate(before[:3]):
            x[10 * at + i] = value
    results = []
    for level in ("avx2", "avx512"):
        t = copies(before)
        step_many([t], [5], Hyper(weight_decay=0.1, adamw=adamw, grad_scale=3.0), level)
        results.append(t)
    for name, a, b in zip("pgmv", *results, strict=True):
        assert_bits(name, a, b)


@pytest.mark.parametrize("request_", ["neon", "avx3", "AVX2 ,", "sse"])
def test_unavailable_level_is_an_error(request_: str, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """Fault: a typo in DS_SIMD silently tests the wrong level."""
    monkeypatch.setenv("DS_SIMD", request_)
    before = random_tensors(5, (F32, F32, F32), rng)
    t = copies(before)
    for call in (simd_level, lambda: step_one(t, 1, Hyper())):
        with pytest.raises(ValueError, match=r"is not available on this CPU; it has .*scalar"):
            call()
    assert_bits("p", t[0], before[0])


# ---- threads and grouping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", [(F32, F32, F32), (BF16, BF16, F32)], ids=combination_id)
def test_threads_and_tensor_count_change_nothing(combination: tuple[torch.dtype, ...], rng: torch.Generator) -> None:
    """Fault: a chunk border that moves with the number of threads, and results with it."""
    sizes = [5, 0, 16384, 16383, 16385, 1, 70_001, 3, 0, 200_003]
    before = [random_tensors(n, combination, rng) for n in sizes]
    steps = [1 + i for i in range(len(sizes))]
    alone = [copies(t) for t in before]
    for t, step in zip(alone, steps, strict=True):
        step_many([t], [step], Hyper(weight_decay=0.1))
    for threads in (1, 2, 3, 64, 10_000):
        together = [copies(t) for t in before]
        step_many(together, steps, Hyper(weight_decay=0.1), threads=threads)
        for a, b in zip(alone, together, strict=True):
            for name, x, y in zip("pgmv", a, b, strict=True):
                assert_bits(name, y, x)


@at_every_level
def test_denormals_are_kept_whatever_the_caller_flushes(level: str, rng: torch.Generator) -> None:
    """Fault: torch.set_flush_denormal acts on one thread, so results would depend on which thread took a chunk."""
    n = 40_000
    p = torch.full((n,), 3e-39)
    before = (p, torch.full((n,), 1e-39), torch.full((n,), 2e-39), torch.zeros(n))
    plain, flushed = copies(before), copies(before)
    h = Hyper(lr=0.5, eps=1.0)
    step_many([plain], [1], h, level, threads=2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        step_many([flushed], [1], h, level, threads=2)
    finally:
        torch.set_flush_denormal(False)
    check(plain, before, 1, h)
    for name, a, b in zip("pgmv", plain, flushed, strict=True):
        assert_bits(name, b, a)


# ---- special values ---------------------------------------------------------------------------------------------


@at_every_level
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_special_values_propagate(combination: tuple[torch.dtype, ...], level: str) -> None:
    """Fault: a clamp, a masked lane or a fast instruction that loses NaN, infinity or a denormal."""
    values = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 6e-8, 1e-39, 65504.0, 1e30, -3e-8]
    grid = torch.cartesian_prod(*(torch.tensor(values),) * 3)
    p, g, m = (grid[:, i].contiguous().to(d) for i, d in enumerate((combination[0], combination[1], combination[2])))
    for v_value in (0.0, 1.0, float("inf"), float("nan")):
        before = (p, g, m, torch.full_like(m, v_value))
        t = copies(before)
        step_one(t, 2, Hyper(weight_decay=0.1))
        ref = adam(*before, 2, Hyper(weight_decay=0.1))
        # Where g * g leaves float32, v is infinite: the step is then 0, or infinity / infinity.
        overflows = ref.v.isfinite() & (ref.v > 3.4e38)
        decayed = before[0].double() * (1 - 0.001)
        for name, got in zip("pmv", (t[0], t[2], t[3]), strict=True):
            want, scale = getattr(ref, name), getattr(ref, name + "_scale")
            if name == "p":
                want = torch.where(overflows & want.isfinite(), decayed, want)
                want = torch.where(overflows & ref.m.isinf(), torch.full_like(want, float("nan")), want)
                scale = torch.where(overflows, decayed.abs(), scale)
            assert_close(name, got, want, scale)


# ---- bias correction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6, 10**9, 2**40])
def test_bias_correction_is_exact_at_any_step(step: int, rng: torch.Generator) -> None:
    """Fault: powers of beta kept as a running product, right only for steps taken one after the other."""
    h = Hyper(lr=0.01, beta2=0.999_999)
    before = random_tensors(1001, (F32, F32, F32), rng)
    t = copies(before)
    step_one(t, step, h)
    check(t, before, step, h)


def test_order_of_steps_is_irrelevant(rng: torch.Generator) -> None:
    """Fault: state of one tensor's step left over for the next (DeepSpeed keeps betta^t per optimizer id)."""
    before = random_tensors(33, (F32, F32, F32), rng)
    alone = {}
    for step in (1, 7, 10**6):
        alone[step] = copies(before)
        step_one(alone[step], step, Hyper())
    create_adam(0, 0.01, 0.9, 0.999, 1e-8, 0.0, True, False)
    for step in (10**6, 1, 7, 1, 10**6):
        p, g, m, v = copies(before)
        adam_update(0, step, 0.01, 0.9, 0.999, 1e-8, 0.0, True, p, g, m, v)
        assert_bits(f"p at step {step}", p, alone[step][0])
    destroy_adam(0)


def test_unlike_steps_in_one_table(rng: torch.Generator) -> None:
    """Fault: one step counter for all tensors of a launch (DeepSpeed PR#8471)."""
    before = [random_tensors(1025, (F32, F32, F32), rng) for _ in range(4)]
    together = [copies(t) for t in before]
    step_many(together, [1, 100, 3, 10**6], Hyper(), threads=2)
    for t, b, step in zip(together, before, [1, 100, 3, 10**6], strict=True):
        check(t, b, step, Hyper())
