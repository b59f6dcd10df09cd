"""FusedAdam and DeepSpeedCPUAdam as optimizers: what a step does to parameters, whatever their gradients look like."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bits, assert_close
from reference import Hyper, adam
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam

SHAPES = [(3, 4), (17,), (1,), (5, 1, 7), (1025,), (2, 3, 4, 5)]


def make_params(rng: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.randn(s, generator=rng).to(device, dtype)) for s in SHAPES]


def twin(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


def give_gradients(params: list[Parameter], rng: torch.Generator, dtype: torch.dtype | None = None) -> None:
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).to(p.device, dtype or p.dtype)


def both_step(a: Any, b: Any, pa: list[Parameter], pb: list[Parameter], rng: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        give_gradients(pa, rng)
        for x, y in zip(pa, pb, strict=True):
            assert x.grad is not None
            y.grad = x.grad.clone()
        a.step()
        b.step()


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_both_classes_give_equal_bits_on_the_cpu(dtype: torch.dtype, adamw: bool, rng: torch.Generator) -> None:
    """Fault: two optimizers of one name and two kinds of rounding."""
    pa = make_params(rng, torch.device("cpu"), dtype)
    pb = twin(pa)
    a = FusedAdam(pa, lr=0.01, weight_decay=0.1, adam_w_mode=adamw)
    b = DeepSpeedCPUAdam(pb, lr=0.01, weight_decay=0.1, adamw_mode=adamw, fp32_optimizer_states=False)
    both_step(a, b, pa, pb, rng, 5)
    for x, y in zip(pa, pb, strict=True):
        assert_bits("p", x, y)
        assert_bits("m", a.state[x]["exp_avg"], b.state[y]["exp_avg"])


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
def test_hundred_steps_beside_torch(adamw: bool, device: torch.device, rng: torch.Generator) -> None:
    """Fault: an error that grows from step to step.

    Each step adds at most a few roundings of p and of the step, about lr in size; 100 of them one after the other,
    worst case all of one sign: 100 * (4 eps * |p| + 8 eps * lr * 10).
    """
    pa = make_params(rng, device)
    pb = twin(pa)
    wide = [Parameter(p.detach().double()) for p in pa]
    theirs = torch.optim.AdamW if adamw else torch.optim.Adam
    a = FusedAdam(pa, lr=0.01, weight_decay=0.01, adam_w_mode=adamw)
    b = theirs(pb, lr=0.01, weight_decay=0.01)
    c = theirs(wide, lr=0.01, weight_decay=0.01)
    for _ in range(100):
        give_gradients(pa, rng)
        for x, y, z in zip(pa, pb, wide, strict=True):
            assert x.grad is not None
            y.grad, z.grad = x.grad.clone(), x.grad.double()
        for optimizer in (a, b, c):
            optimizer.step()
    eps = torch.finfo(torch.float32).eps
    for x, y, z in zip(pa, pb, wide, strict=True):
        allowed = 100 * (4 * eps * z.detach().abs() + 80 * eps * 0.01)
        assert bool(((x.detach().double() - z.detach()).abs() <= allowed).all())
        ours, peers = ((q.detach().double() - z.detach()).abs().max() for q in (x, y))
        assert ours <= 4 * peers + eps, "further from the truth than torch's own float32"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-then-second", "second-then-first"])
@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_one_step_counter_for_all_row(cls: Any, order: tuple[int, int]) -> None:
    """Fault: one step counter for all parameters (DeepSpeed PR#8471); wrong: 0.89662712, 0.81714274."""
    params = [Parameter(torch.ones(1)), Parameter(torch.ones(1))]
    gradients = [[1.0, -2.0, 3.0], [1.0, None, 2.0]]
    optimizer = cls([params[i] for i in order], lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    for step in range(3):
        for p, mine in zip(params, gradients, strict=True):
            value = mine[step]
            p.grad = None if value is None else torch.tensor([value])
        optimizer.step()
    for p, right in zip(params, (0.90228625, 0.80348180), strict=True):
        assert abs(p.item() - right) < 2e-7
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 2]


# ---- gradients of every kind ------------------------------------------------------------------------------------


def strided(p: Tensor) -> Tensor:
    return (torch.arange(12.0, device=p.device) - 5.5).view(4, 3).t()


GRADIENTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "transposed": ((3, 4), strided),
    "expanded": ((3, 4), lambda p: torch.ones((), device=p.device).expand(3, 4)),
    "row-expanded": ((3, 4), lambda p: torch.arange(4.0, device=p.device).expand(3, 4)),
    "channels-last": (
        (2, 3, 4, 5),
        lambda p: torch.arange(120.0, device=p.device).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "offset": ((3, 4), lambda p: torch.arange(13.0, device=p.device)[1:].view(3, 4)),
    "every-other": ((6,), lambda p: torch.arange(12.0, device=p.device)[::2]),
    "conjugated-imaginary": ((1,), lambda p: torch.tensor([1 + 2j], device=p.device).conj().imag.clone()),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradient_strides_row(kind: str, device: torch.device) -> None:
    """Fault: a gradient's memory read in the order of its parameter (pytorch#110758, ROCm/apex#97)."""
    shape, make = GRADIENTS[kind]
    a, b = (Parameter(torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).view(shape)) for _ in range(2))
    oa, ob = FusedAdam([a], lr=0.1), FusedAdam([b], lr=0.1)
    for _ in range(2):
        a.grad = make(a)
        b.grad = a.grad.contiguous().clone()
        oa.step()
        ob.step()
    assert_bits("p", a, b)


def test_lazily_negated_gradient() -> None:
    """Fault: memory that torch shows negated is read as it lies. Only one-element gradients get this far: others of
    their kind (the imaginary part of a conjugate) are strided, and so are copied."""
    p = Parameter(torch.zeros(1))
    p.grad = torch.tensor([1 + 2j]).conj().imag
    FusedAdam([p], lr=0.1).step()
    assert p.item() > 0


def test_lazy_zeros_are_a_gradient() -> None:
    """Fault: a tensor of zeros that has no memory (address 0) counts as no gradient, and gets no decay."""
    p = Parameter(torch.ones(3))
    p.grad = torch._efficientzerotensor((3,))
    optimizer = FusedAdam([p], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((3,), 1 - 0.1 * 0.5)) and int(optimizer.state[p]["step"]) == 1


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_infinite_parameter(decay: float, device: torch.device) -> None:
    """Fault: 0 * inf. Without decay an infinite parameter stays, as with torch; with decay inf - inf is NaN."""
    p = Parameter(torch.tensor([float("inf"), -float("inf"), 1.0], device=device))
    p.grad = torch.ones_like(p)
    FusedAdam([p], lr=0.1, weight_decay=decay).step()
    want = [float("inf"), -float("inf")]
    found = p.detach().cpu()
    assert found[:2].tolist() == want if decay == 0.0 else bool(found[:2].isnan().all())
    assert float(found[2]) < 1.0


@pytest.mark.parametrize("gradient", ["channels-last", "contiguous"])
def test_channels_last_parameter(gradient: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a dense parameter refused for the order of its dimensions, or updated in the wrong order."""
    values, g = (torch.randn(2, 3, 4, 5, generator=rng).to(device) for _ in range(2))
    a, b = Parameter(values.to(memory_format=torch.channels_last)), Parameter(values.clone())
    oa, ob = FusedAdam([a], lr=0.1, weight_decay=0.1), FusedAdam([b], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        a.grad = g.to(memory_format=torch.channels_last) if gradient == "channels-last" else g.clone()
        b.grad = g.clone()
        oa.step()
        ob.step()
    assert a.is_contiguous(memory_format=torch.channels_last)
    assert_bits("p", a, b)


@pytest.mark.parametrize(
    ("p_dtype", "g_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
    ids=str,
)
def test_gradient_dtype_row(
    p_dtype: torch.dtype, g_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """Fault: bytes of one dtype read as another (TE#3358). Computed in float32."""
    start, g = torch.randn(129, generator=rng).to(device, p_dtype), torch.randn(129, generator=rng).to(device, g_dtype)
    p = Parameter(start.clone())
    optimizer = FusedAdam([p], lr=0.01, weight_decay=0.1)
    try:
        p.grad = g
    except RuntimeError:
        p.grad_dtype = None  # newer torch guards the dtype of .grad
        p.grad = g
    optimizer.step()
    zeros = torch.zeros(129)
    ref = adam(start.cpu(), g.cpu(), zeros, zeros, 1, Hyper(lr=0.01, weight_decay=0.1))
    assert_close("p", p, ref.p, ref.p_scale)


def test_gradient_dtype_that_no_kernel_reads_is_refused() -> None:
    """Fault: as above, for float16 parameters with bfloat16 gradients on the CPU: a TypeError naming both."""
    from deepspeed_ops.cpu_adam import adam_update, create_adam

    create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    p = torch.ones(4, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"formats 1, 2, 0|float16.*bfloat16"):
        m, v = torch.zeros(4), torch.zeros(4)
        adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, p, torch.ones(4, dtype=torch.bfloat16), m, v)
    assert torch.equal(p, torch.ones(4, dtype=torch.float16))


def test_alternating_gradients(device: torch.device, rng: torch.Generator) -> None:
    """Fault: a plan made for one pattern of None gradients used for another."""
    pa = make_params(rng, device)
    pb = twin(pa)
    a = FusedAdam(pa, lr=0.01, weight_decay=0.1)
    singles = [FusedAdam([p], lr=0.01, weight_decay=0.1) for p in pb]
    for step in range(8):
        for i, (x, y, single) in enumerate(zip(pa, pb, singles, strict=True)):
            present = (step >> (i % 3)) & 1
            x.grad = torch.randn(x.shape, generator=rng).to(device) if present else None
            y.grad = None if x.grad is None else x.grad.clone()
            single.step()
        a.step()
        for x, y in zip(pa, pb, strict=True):
            assert_bits(f"p after step {step}", x, y)


def test_no_gradient_at_all(device: torch.device) -> None:
    """Fault: an empty launch, or a parameter without gradient that decays."""
    p = Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([p], weight_decay=0.5, lr=1.0)
    optimizer.step()
    assert bool((p == 1).all()) and not optimizer.state[p]


# ---- empty tensors ----------------------------------------------------------------------------------------------


def test_four_ones_and_an_empty_one(device: torch.device) -> None:
    """Fault: an empty tensor in the list shifts the others (TE#3207)."""
    p, empty = Parameter(torch.ones(4, device=device)), Parameter(torch.ones(0, device=device))
    optimizer = FusedAdam([p, empty], lr=0.1)
    p.grad, empty.grad = torch.ones(4, device=device), torch.ones(0, device=device)
    optimizer.step()
    assert bool(((p - 0.9).abs() < 1e-6).all())


@pytest.mark.parametrize("block", range(0, 129, 43))
def test_one_empty_among_128(block: int, device: torch.device) -> None:
    """Fault: as above, at every position, since chunks are found by binary search over the tensors."""
    for k in range(block, min(block + 43, 129)):
        params = [Parameter(torch.full((1,), float(i), device=device)) for i in range(128)]
        params.insert(k, Parameter(torch.empty(0, device=device)))
        optimizer = FusedAdam(params, lr=0.1)
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 if i % 2 else -1.0)
        optimizer.step()
        want = [float(i) for i in range(128)]
        got = torch.cat([p.detach() for p in params]).cpu()
        signs = torch.tensor([1.0 if i % 2 else -1.0 for i in range(129) if i != k])
        assert torch.allclose(got, torch.tensor(want) - 0.1 * signs, atol=1e-5), f"empty at {k}"


def test_all_empty_and_empty_group(device: torch.device) -> None:
    """Fault: a grid of zero blocks, a minimum over nothing."""
    params = [Parameter(torch.empty(0, 3, device=device)) for _ in range(3)]
    p = Parameter(torch.ones(2, device=device))
    optimizer = FusedAdam([{"params": params}, {"params": []}, {"params": [p]}], lr=0.1)
    for x in (*params, p):
        x.grad = torch.ones_like(x)
    for _ in range(2):
        optimizer.step()
    assert bool(((p - 0.8).abs() < 1e-5).all())


# ---- lifetimes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_gradients_die_with_zero_grad(cls: Any) -> None:
    """Fault: a cached table keeps every gradient of the last step alive: a quarter of the memory."""
    p = Parameter(torch.ones(1000))
    optimizer = cls([p])
    for _ in range(2):
        p.grad = torch.ones(1000)
        gradient = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        assert gradient() is None


def test_optimizer_and_parameters_die(device: torch.device) -> None:
    """Fault: a cache of tables that keeps models alive."""
    p = Parameter(torch.ones(1000, device=device))
    optimizer = FusedAdam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    refs = [weakref.ref(p), weakref.ref(optimizer), weakref.ref(optimizer.state[p]["exp_avg"])]
    del p, optimizer
    gc.collect()
    assert [r() for r in refs] == [None, None, None]


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad_semantics(set_grad_none: bool) -> None:
    """Fault: zeroed gradients are None, or None gradients are zeroed: the next step differs."""
    p = Parameter(torch.ones(4))
    optimizer = FusedAdam([p], set_grad_none=set_grad_none)
    p.grad = torch.ones(4)
    optimizer.zero_grad()
    assert (p.grad is None) is set_grad_none
    p.grad = torch.ones(4)
    optimizer.zero_grad(set_to_none=not set_grad_none)
    assert (p.grad is None) is not set_grad_none
