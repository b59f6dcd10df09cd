"""FusedLamb against the float64 formula: ratios, clipping, copies, DeepSpeed's function and arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bits, assert_close
from deepspeed_ops.op_builder.errors import TensorError, UsageError
from family import give, parameters, twins
from reference_optimizers import LambHyper, lamb
from torch.nn import Parameter

from deepspeed_ops import fused_lamb
from deepspeed_ops.lamb import FusedLamb

H = LambHyper(weight_decay=0.1)
OPTIONS: dict[str, Any] = {"lr": H.lr, "eps": H.eps, "weight_decay": H.weight_decay}


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_steps_against_float64(
    dtype: torch.dtype, corrected: bool, inside: bool, device: torch.device, rng: torch.Generator
) -> None:
    """Fault: another formula, a ratio of the neighbour, bias correction of another step."""
    h = LambHyper(weight_decay=0.1, eps_inside_sqrt=inside, bias_correction=corrected)
    params = [Parameter(torch.randn(n, generator=rng).to(device, dtype)) for n in (1, 4, 513, 70_001)]
    optimizer = FusedLamb(params, bias_correction=corrected, eps_inside_sqrt=inside, **OPTIONS)
    before = [
        (p.detach().cpu().clone(), torch.zeros(p.numel(), dtype=dtype), torch.zeros(p.numel(), dtype=dtype))
        for p in params
    ]
    for step in (1, 2, 3):
        give(params, rng)
        optimizer.step()
        for i, (p, (old, m, v), ratio) in enumerate(zip(params, before, optimizer.get_lamb_coeffs(), strict=True)):
            ref = lamb(old, p.grad.cpu(), m, v, step, h)
            assert_close(f"p {i}", p, ref.p, ref.p_scale)
            assert abs(ratio - ref.ratio) <= 1.2e-7 * (1 + ref.ratio_scale) * ref.ratio
            state = optimizer.state[p]
            before[i] = (p.detach().cpu().clone(), state["exp_avg"].cpu().clone(), state["exp_avg_sq"].cpu().clone())


def test_max_grad_norm_is_the_norm_over_all_groups(device: torch.device, rng: torch.Generator) -> None:
    """Fault: a norm per group or per tensor, or a step that waits for the device to know it."""
    params = parameters(rng, device)
    others = twins(params)
    give(params, rng)
    norm = torch.cat([p.grad.flatten() for p in params]).norm()
    a = FusedLamb([{"params": params[:2]}, {"params": params[2:]}], max_grad_norm=0.5, **OPTIONS)
    b = FusedLamb(others, **OPTIONS)
    for p, q in zip(params, others, strict=True):
        q.grad = p.grad / ((norm + 1e-6) / 0.5)
    a.step()
    b.step()
    for p, q in zip(params, others, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert torch.allclose(a.state[p]["exp_avg"], b.state[q]["exp_avg"], rtol=1e-5, atol=1e-9)
    loose = FusedLamb(others, max_grad_norm=1e9, **OPTIONS)
    loose.load_state_dict(b.state_dict())
    twin = twins(others)
    c = FusedLamb(twin, **OPTIONS)
    c.load_state_dict(b.state_dict())
    for q, t in zip(others, twin, strict=True):
        t.grad = q.grad
    loose.param_groups[0]["max_grad_norm"] = 1e9
    loose.step()
    c.step()
    for q, t in zip(others, twin, strict=True):
        assert torch.allclose(q, t, rtol=1e-6, atol=1e-8)


def test_old_arguments_of_step(device: torch.device, rng: torch.Generator) -> None:
    """Fault: grads, output_params, scale or grad_norms of DeepSpeed's callers ignored."""
    params = parameters(rng, device)
    others = twins(params)
    half = [torch.randn(p.shape, generator=rng).to(device, torch.float16) for p in params]
    outputs = [torch.zeros_like(g) for g in half]
    a, b = FusedLamb(params, max_grad_norm=1.0, **OPTIONS), FusedLamb(others, **OPTIONS)
    a.step(grads=iter(half), output_params=outputs, scale=128.0, grad_norms=[256.0])
    for q, g in zip(others, half, strict=True):
        q.grad = g.float() / 256.0  # norm 256 / 128 = 2, twice what is allowed
    b.step()
    for p, q, out in zip(params, others, outputs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert_bits("output", out, p.detach().half())
        assert p.grad is None
    with pytest.raises(TensorError, match="2 groups"):
        a.step(grads=[[half[0]], [half[1]]])
    with pytest.raises(TensorError, match="4 gradients"):
        a.step(grads=half[:4])
    with pytest.raises(UsageError, match="scale"):
        a.step(scale=0.0)
    with pytest.raises(UsageError, match="grad_norms"):
        a.step(grad_norms=[1.0, 2.0])


@pytest.mark.parametrize("mode", [0, 1])
def test_lamb_function_of_deepspeed(mode: int, device: torch.device, rng: torch.Generator) -> None:
    """Fault: an argument in another place; float16 gradients with float32 parameters and a float16 copy."""
    n = 3001
    p, m = (torch.randn(n, generator=rng) for _ in range(2))
    v = torch.rand(n, generator=rng)
    g = (torch.randn(n, generator=rng) * 64).half()
    h = LambHyper(0.01, 0.9, 0.99, 1e-6, 0.1, 5.0, 0.1, mode == 0, True, 64.0)
    ref = lamb(p, g, m, v, 4, h)
    p, m, v, g = (x.to(device) for x in (p, m, v, g))
    copy = torch.zeros(n, dtype=torch.float16, device=device)
    ratio = fused_lamb.lamb(p, copy, m, v, g, 0.01, 0.9, 0.99, 5.0, 0.1, 1e-6, 64.0, 4, mode, 1, 0.1)
    assert_close("p", p, ref.p, ref.p_scale)
    assert_close("v", v, ref.v, ref.v_scale)
    assert_bits("copy", copy, p.half())
    assert ratio.shape == (1,) and abs(float(ratio) - ref.ratio) <= 1e-5 * ref.ratio
    empty = torch.empty(0, device=device)
    assert fused_lamb.lamb(p, empty, m, v, g, 0.01, 0.9, 0.99, 5.0, 0.1, 1e-6, 64.0, 5, mode, 1, 0.1).numel() == 1
    for bad in ((5, 2, 1), (0, 1, 1)):
        with pytest.raises(UsageError):
            fused_lamb.lamb(p, empty, m, v, g, 0.01, 0.9, 0.99, 5.0, 0.1, 1e-6, 64.0, bad[0], bad[1], bad[2], 0.1)


def test_nan_reaches_its_tensor_and_no_other(device: torch.device) -> None:
    """Documented: a NaN goes through the norm to all elements of its tensor; other tensors do not see it."""
    a, b = (Parameter(torch.ones(700, device=device)) for _ in range(2))
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    a.grad[3] = float("nan")
    optimizer = FusedLamb([a, b], lr=0.1)
    optimizer.step()
    assert bool(a.isnan().all()) and bool(b.isfinite().all())
    assert optimizer.get_lamb_coeffs()[1] == pytest.approx(optimizer.get_lamb_coeffs()[1])


def test_coefficients_follow_the_parameters(device: torch.device, rng: torch.Generator) -> None:
    """Fault: ratios in the order of dtypes, or of tensors that took no step."""
    params = [Parameter(torch.randn(9, generator=rng).to(device, d)) for d in (torch.float32, torch.bfloat16) * 2]
    optimizer = FusedLamb([{"params": params[:3]}, {"params": params[3:]}], **OPTIONS)
    assert optimizer.get_lamb_coeffs() == []
    give(params, rng)
    params[2].grad = None
    optimizer.step()
    got = optimizer.get_lamb_coeffs()
    assert len(got) == 3
    for p, ratio in zip([params[0], params[1], params[3]], got, strict=True):
        alone = Parameter(p.detach().clone())
        assert 0.01 <= ratio <= 10.0 and alone.numel() == 9


def test_options_are_checked() -> None:
    """Fault: an option taken and not applied."""
    p = Parameter(torch.ones(3))
    for bad in (
        {"amsgrad": True},
        {"min_coeff": 2.0, "max_coeff": 1.0},
        {"max_grad_norm": -1.0},
        {"betas": (1.0, 0.9)},
    ):
        with pytest.raises(UsageError):
            FusedLamb([p], **bad)
    assert FusedLamb([p], eps_inside_sqrt=True).eps_mode == 0 and FusedLamb([p]).eps_mode == 1
