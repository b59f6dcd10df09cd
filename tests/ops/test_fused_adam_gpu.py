"""fused_adam on a GPU: dtypes x modes x sizes against float64, equal bits with the CPU, DeepSpeed's raw functions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from compare import assert_bits, assert_close
from deepspeed_ops.op_builder.errors import OpsError, TensorError, UsageError
from raw import BF16, F16, F32, combination_id
from reference import Hyper, adam
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ops.adam import FusedAdam
from deepspeed_ops.cpu_adam import simd_levels
from deepspeed_ops.fused_adam import fused_adam_, multi_tensor_adam, multi_tensor_check_finite

pytestmark = pytest.mark.gpu
F64 = torch.float64
CUDA = torch.device("cuda", 0)
COMBINATIONS = list(itertools.product((F32, F16, BF16), repeat=3))
SIZES = [0, 1, 3, 4, 5, 127, 128, 129, 511, 512, 513, 1023, 1025, 100_003, 0, 2**20 + 3]
Lists = list[list[Tensor]]


def random_lists(sizes: list[int], dtypes: tuple[torch.dtype, ...], rng: torch.Generator) -> Lists:
    pd, gd, sd = dtypes
    wide = {"generator": rng, "dtype": F64} if F64 in dtypes else {"generator": rng}
    return [
        [torch.randn(n, **wide).to(CUDA, pd) for n in sizes],  # type: ignore[call-overload]
        [torch.randn(n, **wide).to(CUDA, gd) for n in sizes],  # type: ignore[call-overload]
        [torch.randn(n, **wide).to(CUDA, sd) for n in sizes],  # type: ignore[call-overload]
        [torch.rand(n, **wide).to(CUDA, sd) for n in sizes],  # type: ignore[call-overload]
    ]


def clone(lists: Lists) -> Lists:
    return [[x.clone() for x in xs] for xs in lists]


def op_step(lists: Lists, step: int, h: Hyper, device_steps: bool = False, **extra: Any) -> list[Tensor]:
    """One step through torch.ops; the counters afterwards."""
    where = CUDA if device_steps else torch.device("cpu")
    steps = [torch.tensor(step - 1, device=where) for _ in lists[0]]
    scalars = (h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.adamw, h.bias_correction)
    tensors = (extra.get("noop_flag"), extra.get("grad_scale"), extra.get("found_inf"))
    fused_adam_(*lists, steps, extra.get("lr_tensor"), *scalars, *tensors)
    return steps


def check(lists: Lists, before: Lists, step: int, h: Hyper) -> None:
    eps = 2.0**-52 if lists[0][0].dtype is F64 else 2.0**-23
    # Float64 math is judged by the same float64 formula, which rounds as often itself: twice the bound. Its scalars
    # come from the device's or torch's pow, right to two units in the last place: one more.
    k = 3.0 if eps < 1e-10 else 1.0
    for p, g, m, v, p0, g0, m0, v0 in zip(*lists, *before, strict=True):
        ref = adam(p0.cpu(), g0.cpu(), m0.cpu(), v0.cpu(), step, h)
        assert_bits("g", g, g0)
        for name, got in (("p", p), ("m", m), ("v", v)):
            where = f"{name}[{p.numel()}]"
            assert_close(where, got, getattr(ref, name), getattr(ref, name + "_scale"), eps=eps, k=k)


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("bias_correction", [True, False], ids=["corrected", "plain"])
@pytest.mark.parametrize("dtypes", [*COMBINATIONS, (F64, F64, F64)], ids=str)
def test_against_float64(
    dtypes: tuple[torch.dtype, ...], bias_correction: bool, adamw: bool, rng: torch.Generator
) -> None:
    """Fault: a wrong tail, a wrong conversion, a format branch that reads another format."""
    h = Hyper(weight_decay=0.1, adamw=adamw, bias_correction=bias_correction)
    before = random_lists(SIZES, dtypes, rng)
    lists = clone(before)
    op_step(lists, 3, h)
    check(lists, before, 3, h)


@pytest.mark.parametrize("device_steps", [False, True], ids=["host-counted", "device-counted"])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, BF16, F32), (F64, F64, F64)], ids=str)
@pytest.mark.parametrize("step", [1, 2, 1000, 10**6, 2**40])
def test_bias_correction_at_any_step(
    step: int, dtypes: tuple[torch.dtype, ...], device_steps: bool, rng: torch.Generator
) -> None:
    """Fault: a power in float32, or counters of 32 bits."""
    h = Hyper(beta2=0.999_999)
    before = random_lists([1025], dtypes, rng)
    lists = clone(before)
    assert [int(s) for s in op_step(lists, step, h, device_steps)] == [step]
    check(lists, before, step, h)


@pytest.mark.parametrize("device_steps", [False, True], ids=["host-counted", "device-counted"])
def test_unlike_steps_in_one_launch(device_steps: bool, rng: torch.Generator) -> None:
    """Fault: one step counter for all tensors of a launch (DeepSpeed PR#8471)."""
    before = random_lists([513, 5, 700], (F32, F32, F32), rng)
    lists, h = clone(before), Hyper(weight_decay=0.1)
    steps = [torch.tensor(s, device=CUDA if device_steps else "cpu") for s in (0, 99, 10**6 - 1)]
    fused_adam_(*lists, steps, None, h.lr, h.beta1, h.beta2, h.eps, 0.1, True, True, None, None, None)
    for i, step in enumerate((1, 100, 10**6)):
        check([[xs[i]] for xs in lists], [[xs[i]] for xs in before], step, h)


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F16, F16), (BF16, F32, F32), (F64, F64, F64)], ids=str)
def test_any_element_alignment(dtypes: tuple[torch.dtype, ...], rng: torch.Generator) -> None:
    """Fault: a 16-byte access to an address that is not aligned, or a store past either end."""
    for n in (1, 5, 511, 1030):
        before = random_lists([n], dtypes, rng)
        expected = clone(before)
        op_step(expected, 2, Hyper(weight_decay=0.1))
        for offset in (1, 2, 3, 5):
            rooms = [torch.full((n + 16,), 77.0, dtype=xs[0].dtype, device=CUDA) for xs in before]
            views = [[room[offset : offset + n]] for room in rooms]
            for view, xs in zip(views, before, strict=True):
                view[0].copy_(xs[0])
            op_step(views, 2, Hyper(weight_decay=0.1))
            for view, room, want in zip(views, rooms, expected, strict=True):
                assert_bits(f"+{offset}", view[0], want[0])
                assert bool((room[:offset] == 77).all()) and bool((room[offset + n :] == 77).all())


def test_special_values() -> None:
    """Fault: NaN, infinity, denormals or signed zeros lost (no fast math, no flushing)."""
    values = torch.tensor([0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 1e-39, -3e-41])
    grid = torch.cartesian_prod(values, values, values)
    for dtypes in ((F32, F32, F32), (F16, F16, F16), (BF16, BF16, F32)):
        lists = [[grid[:, i].to(CUDA, d).contiguous()] for i, d in enumerate(dtypes)]
        lists.append([torch.full_like(lists[2][0], 0.25)])
        before = clone(lists)
        op_step(lists, 2, Hyper(weight_decay=0.1))
        check(lists, before, 2, Hyper(weight_decay=0.1))


def test_conversions_over_all_patterns() -> None:
    """Fault: half and bfloat conversions of the kernel differ from the CPU's."""
    from test_conversions import COPY, patterns, rounding_boundaries

    for dtype in (F16, BF16):
        g = patterns(dtype).to(CUDA)
        zeros = torch.zeros(2**16, device=CUDA)
        m = zeros.clone()
        op_step([[zeros.clone()], [g], [m], [zeros.clone()]], 1, COPY)
        want = g.float()
        nan = want.isnan()
        assert torch.equal(m.isnan(), nan) and torch.equal(m[~nan], want[~nan])
        values = rounding_boundaries(dtype)
        values = values[values != 0]
        narrow = torch.zeros(len(values), dtype=dtype, device=CUDA)
        m = narrow.clone()
        op_step([[narrow.clone()], [values.to(CUDA)], [m], [narrow.clone()]], 1, COPY)
        assert_bits("m", m, values.to(dtype))


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)], ids=combination_id)
def test_cpu_and_gpu_give_equal_bits(dtypes: tuple[torch.dtype, ...], adamw: bool, rng: torch.Generator) -> None:
    """Fault: contraction, another order of operations, another rounding. The CPU level must have fma as the GPU does;
    on the scalar level the bound is 2 eps (|p| + |step|) a step."""
    cpu = [Parameter(torch.randn(n, generator=rng).to(dtypes[0])) for n in (5, 1025, 70_001)]
    gpu = [Parameter(p.detach().clone().to(CUDA)) for p in cpu]
    a, b = (FusedAdam(ps, lr=0.01, weight_decay=0.1, adam_w_mode=adamw) for ps in (cpu, gpu))
    for _ in range(10):
        for x, y in zip(cpu, gpu, strict=True):
            gradient = torch.randn(x.shape, generator=rng).to(dtypes[1])
            for p in (x, y):
                if dtypes[0] is not dtypes[1] and hasattr(p, "grad_dtype"):
                    p.grad_dtype = None
                p.grad = gradient.to(p.device)
        a.step()
        b.step()
    for x, y in zip(cpu, gpu, strict=True):
        if simd_levels()[0] == "scalar":
            allowed = 10 * 2 * torch.finfo(dtypes[0]).eps * (x.detach().float().abs() + 0.1)
            assert bool(((x.detach().float() - y.detach().cpu().float()).abs() <= allowed).all())
        else:
            assert_bits("p", y, x.detach())
            assert_bits("v", b.state[y]["exp_avg_sq"], a.state[x]["exp_avg_sq"])


def test_same_input_same_bits(rng: torch.Generator) -> None:
    """Fault: the spec says deterministic."""
    before = random_lists([5, 100_003], (BF16, BF16, F32), rng)
    runs = [clone(before) for _ in range(3)]
    for lists in runs:
        op_step(lists, 2, Hyper(weight_decay=0.1))
    for lists in runs[1:]:
        for xs, ys in zip(runs[0], lists, strict=True):
            for x, y in zip(xs, ys, strict=True):
                assert_bits("again", y, x)


def test_thousands_of_tensors(rng: torch.Generator) -> None:
    """Fault: a table or chunk list with a limit (apex: 110 tensors, 320 blocks a launch)."""
    sizes = [1 + i % 700 for i in range(5000)]
    before = random_lists(sizes, (F32, F32, F32), rng)
    lists = clone(before)
    op_step(lists, 3, Hyper(weight_decay=0.1))
    check([xs[::97] for xs in lists], [xs[::97] for xs in before], 3, Hyper(weight_decay=0.1))
    flat = [torch.cat(xs) for xs in before]
    together = [[x] for x in flat]
    op_step(together, 3, Hyper(weight_decay=0.1))
    assert_bits("all", torch.cat(lists[0]), together[0][0])


# ---- scalars on the device --------------------------------------------------------------------------------------


def test_noop_flag_and_found_inf(rng: torch.Generator) -> None:
    """Fault: a flagged step happens or counts."""
    before = random_lists([513], (F32, F32, F32), rng)
    for name, dtype in (("noop_flag", torch.int32), ("found_inf", F32)):
        for device_steps in (True, False):
            lists = clone(before)
            flag = torch.ones(1, dtype=dtype, device=CUDA)
            steps = op_step(lists, 3, Hyper(), device_steps, **{name: flag})
            for xs, ys in zip(lists, before, strict=True):
                assert_bits(name, xs[0], ys[0])
            if device_steps:
                assert int(steps[0]) == 2
            op_step(lists, 3, Hyper(), device_steps, **{name: flag.zero_()})
            check(lists, before, 3, Hyper())


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F16, F32), (F64, F64, F64)], ids=str)
def test_grad_scale(dtypes: tuple[torch.dtype, ...], rng: torch.Generator) -> None:
    """Fault: gradients stay scaled."""
    before = random_lists([513], dtypes, rng)
    lists, h = clone(before), Hyper(weight_decay=0.1, grad_scale=1024.0)
    op_step(lists, 3, h, grad_scale=torch.tensor([1024.0], device=CUDA))
    check(lists, before, 3, h)


@pytest.mark.parametrize("lr_dtype", [F32, F64], ids=str)
def test_lr_as_device_tensor(lr_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Fault: a float64 learning rate read as float32, or the host's number used."""
    before = random_lists([513], (F32, F32, F32), rng)
    lists = clone(before)
    lr = torch.tensor(0.25, dtype=lr_dtype, device=CUDA)
    op_step(lists, 3, Hyper(lr=99.0, weight_decay=0.1), True, lr_tensor=lr)
    check(lists, before, 3, Hyper(lr=0.25, weight_decay=0.1))
    with pytest.raises(UsageError, match="lr is a tensor"):
        op_step(lists, 3, Hyper(), False, lr_tensor=lr)


def test_scalars_of_the_wrong_kind_are_refused(rng: torch.Generator) -> None:
    """Fault: a host address read by the device: an illegal access that kills the process's context."""
    lists = random_lists([5], (F32, F32, F32), rng)
    flag = torch.zeros(1, dtype=torch.int32)
    raw = [[lists[1][0]], [lists[0][0]], [lists[2][0]], [lists[3][0]]]
    with pytest.raises(OpsError, match="noop_flag"):
        multi_tensor_adam(2048, flag, raw, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    with pytest.raises(OpsError, match="noop_flag"):
        op_step(lists, 1, Hyper(), noop_flag=torch.zeros(1, dtype=torch.int64, device=CUDA))
    with pytest.raises(OpsError, match="gradient 1 is on cpu"):
        multi_tensor_check_finite(flag.to(CUDA), [lists[1][0], torch.ones(3)])
    with pytest.raises(OpsError):
        op_step([lists[0], [lists[1][0].cpu()], lists[2], lists[3]], 1, Hyper())
    torch.cuda.synchronize()


# ---- DeepSpeed's functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 1], ids=["l2", "adamw"])
def test_multi_tensor_adam(mode: int, rng: torch.Generator) -> None:
    """Fault: another order of lists or arguments than DeepSpeed's."""
    before = random_lists([513, 0, 5], (F32, F32, F32), rng)
    lists, flag = clone(before), torch.zeros(1, dtype=torch.int32, device=CUDA)
    p, g, m, v = lists
    multi_tensor_adam(2048 * 32, flag, [g, p, m, v], 0.01, 0.9, 0.999, 1e-8, 3, mode, 1, 0.1)
    check(lists, before, 3, Hyper(weight_decay=0.1, adamw=mode == 1))
    flag.fill_(1)
    after = clone(lists)
    multi_tensor_adam(2048 * 32, flag, [g, p, m, v], 0.01, 0.9, 0.999, 1e-8, 4, mode, 1, 0.1)
    for xs, ys in zip(lists, after, strict=True):
        for x, y in zip(xs, ys, strict=True):
            assert_bits("flagged", x, y)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_check_finite_finds_any_element(dtype: torch.dtype, bad: float) -> None:
    """Fault: the last element of an odd tensor, or a dtype among others, is not looked at."""
    sizes = [1, 5, 512, 1027, 0]
    for i, n in enumerate(sizes):
        for at in {0, n // 2, n - 1} if n else set():
            gradients = [torch.full((k,), 60_000.0, device=CUDA).to(dtype) for k in sizes]
            gradients.append(torch.ones(7, device=CUDA, dtype=F32))
            flag = torch.zeros(1, dtype=torch.int32, device=CUDA)
            multi_tensor_check_finite(flag, gradients)
            assert int(flag) == 0
            gradients[i][at] = bad
            multi_tensor_check_finite(flag, gradients)
            assert int(flag) == 1, f"element {at} of {n}"
            gradients[i][at] = 0.0
            multi_tensor_check_finite(flag, gradients)
            assert int(flag) == 1, "never back to 0"


def test_check_finite_takes_numbers_of_every_size() -> None:
    """Fault: the largest finite number or a denormal counted as infinite."""
    for dtype in (F32, F16, BF16, F64):
        info = torch.finfo(dtype)
        g = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 4, 0.0], dtype=dtype, device=CUDA)
        flag = torch.zeros(1, dtype=torch.int32, device=CUDA)
        multi_tensor_check_finite(flag, [g, g[1:], g[:1]])
        assert int(flag) == 0
    with pytest.raises(TensorError, match="strides"):
        multi_tensor_check_finite(flag, [torch.ones(4, 4, device=CUDA)[:, ::2]])


# ---- large ------------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    """Fault: an index of 32 bits (a 64-bit fix reached adam's copy of a header and not lion's)."""
    row, n = 4096, 2**31 + 3 * 4096
    free, _ = torch.cuda.mem_get_info(0)
    if free < 24 * n // 2:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free")
    generator = torch.Generator().manual_seed(1)
    small = random_lists([row], (BF16, BF16, BF16), generator)
    big = [[xs[0].repeat(n // row)] for xs in small]
    op_step(big, 3, Hyper(weight_decay=0.1))
    op_step(small, 3, Hyper(weight_decay=0.1))
    for name, xs, ys in zip("pgmv", big, small, strict=True):
        for block in xs[0].view(-1, row).split(2**16):
            assert torch.equal(block, ys[0].expand_as(block)), name
    flag = torch.zeros(1, dtype=torch.int32, device=CUDA)
    multi_tensor_check_finite(flag, big[1])
    assert int(flag) == 0
    big[1][0][-1] = float("nan")
    multi_tensor_check_finite(flag, big[1])
    assert int(flag) == 1
