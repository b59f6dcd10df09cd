"""The comparator itself: right results pass, and results of broken kernels are caught, each kind by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import Mismatch, assert_bits, assert_close
from reference import Hyper, Step, adam, adam_eager
from torch import Tensor

H = Hyper(lr=0.01, weight_decay=0.1)
N = 4099
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def inputs(rng: torch.Generator) -> Inputs:
    p, g, m = (torch.randn(N, generator=rng) for _ in range(3))
    return p, g, m, torch.rand(N, generator=rng)


def right(inputs: Inputs, h: Hyper = H, step: int = 3) -> tuple[Tensor, ...]:
    ref = adam(*inputs, step, h)
    return ref.p.float(), ref.m.float(), ref.v.float()


def check(got: tuple[Tensor, ...], ref: Step) -> None:
    for name, x in zip("pmv", got, strict=True):
        assert_close(name, x, getattr(ref, name), getattr(ref, name + "_scale"))


def noop(i: Inputs) -> tuple[Tensor, ...]:
    return i[0], i[2], i[3]


def sign_flip(i: Inputs) -> tuple[Tensor, ...]:
    p, m, v = right(i)
    return 2 * i[0] - p, m, v


def shuffled(i: Inputs) -> tuple[Tensor, ...]:
    p, m, v = right(i)
    return torch.cat((p[: N // 2].flip(0), p[N // 2 :])), m, v


def tail_unwritten(i: Inputs) -> tuple[Tensor, ...]:
    p, m, v = right(i)
    return torch.cat((p[:-1], i[0][-1:])), m, v


def one_step_missing(i: Inputs) -> tuple[Tensor, ...]:
    return right(i, step=2)


def decay_ignored(i: Inputs) -> tuple[Tensor, ...]:
    return right(i, Hyper(lr=0.01, weight_decay=0.0))


def l2_for_adamw(i: Inputs) -> tuple[Tensor, ...]:
    return right(i, Hyper(lr=0.01, weight_decay=0.1, adamw=False))


def eps_inside_the_root(i: Inputs) -> tuple[Tensor, ...]:
    return right(i, Hyper(lr=0.01, weight_decay=0.1, eps=1e-4))


def rounded_to_bfloat(i: Inputs) -> tuple[Tensor, ...]:
    p, m, v = right(i)
    return p, m.bfloat16().float(), v


def nan_in_one(i: Inputs) -> tuple[Tensor, ...]:
    p, m, v = right(i)
    p[7] = float("nan")
    return p, m, v


BROKEN: list[Callable[[Inputs], tuple[Tensor, ...]]] = [
    noop, sign_flip, shuffled, tail_unwritten, one_step_missing, decay_ignored, l2_for_adamw, eps_inside_the_root,
    rounded_to_bfloat, nan_in_one,
]  # fmt: skip


def test_right_results_pass(inputs: Inputs) -> None:
    """Fault: a bound so tight that nothing meets it is soon loosened for everybody."""
    check(right(inputs), adam(*inputs, 3, H))
    check(adam_eager(*inputs, 3, H), adam(*inputs, 3, H))


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda k: k.__name__)
def test_broken_kernels_are_caught(inputs: Inputs, kernel: Callable[[Inputs], tuple[Tensor, ...]]) -> None:
    """Fault: a comparison of norms, which a kernel that does nothing passes (STYLE.md, 2)."""
    with pytest.raises(Mismatch):
        check(kernel(inputs), adam(*inputs, 3, H))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_allows_one_rounding_only(inputs: Inputs, dtype: torch.dtype) -> None:
    """Fault: an element two roundings away passes because the dtype is coarse."""
    ref = adam(*inputs, 3, H)
    stored = ref.p.to(dtype)
    assert_close("p", stored, ref.p, ref.p_scale)
    neighbour = (stored.view(torch.int16) + 1).view(dtype)
    with pytest.raises(Mismatch):
        assert_close("p", neighbour, ref.p, ref.p_scale)


def test_bits_see_what_equality_hides() -> None:
    """Fault: -0 counted as 0, or NaN as different from itself."""
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    with pytest.raises(Mismatch):
        assert_bits("zero", zero, -zero)
    assert_bits("nan", nan, nan.clone())


def test_reference_equals_torch_in_float64(inputs: Inputs) -> None:
    """Fault: the reference itself is wrong. torch's own AdamW and Adam are the second opinion, over ten steps."""
    for optimizer, adamw in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        p, grads, m, v = (x.double() for x in inputs)
        m, v = torch.zeros_like(m), torch.zeros_like(v)
        theirs = torch.nn.Parameter(p.clone())
        opt = optimizer([theirs], lr=0.01, weight_decay=0.1)
        for step in range(1, 11):
            theirs.grad = grads * step
            opt.step()
            result = adam(p, grads * step, m, v, step, Hyper(lr=0.01, weight_decay=0.1, adamw=adamw))
            p, m, v = result.p, result.m, result.v
        assert torch.allclose(p, theirs.detach(), rtol=1e-13, atol=1e-15)
