"""clip_grad_norm_ beside torch's, on both devices; it waits for nothing."""

from __future__ import annotations

import pytest
import torch
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from family import parameters, twins
from torch.nn import Parameter

from deepspeed_ops.clip_grad_norm import clip_grad_norm_, global_norm


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_equals_torch(dtype: torch.dtype, max_norm: float, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a tensor left out of the norm or of the scaling."""
    params = parameters(rng, device, dtype)
    others = twins(params)
    for p, q in zip(params, others, strict=True):
        p.grad = torch.randn(p.shape, generator=rng).to(device, dtype)
        q.grad = p.grad.clone()
    params[1].grad = others[1].grad = None
    for _ in range(2):
        ours = clip_grad_norm_(params, max_norm)
        theirs = torch.nn.utils.clip_grad_norm_(others, max_norm)
        eps = max(torch.finfo(dtype).eps, 1e-6)
        assert ours.device == params[0].device and abs(float(ours) - float(theirs)) <= 2 * eps * float(theirs)
        for p, q in zip(params, others, strict=True):
            if p.grad is not None:
                assert torch.allclose(p.grad, q.grad, rtol=2 * eps, atol=1e-7)


def test_mixed_dtypes_and_odd_layouts(device: torch.device, rng: torch.Generator) -> None:
    """Fault: one dtype's tensors read as another's."""
    grads = [torch.randn(7, 5, generator=rng).to(device, d) for d in (torch.float32, torch.float16, torch.bfloat16)]
    want = torch.cat([g.double().flatten() for g in grads]).norm()
    assert float(global_norm(grads)) == pytest.approx(float(want), rel=1e-5)
    assert float(global_norm([g.t() for g in grads])) == pytest.approx(float(want), rel=1e-5)
    assert float(global_norm([])) == 0.0 and float(global_norm([torch.zeros(0, device=device)])) == 0.0


def test_same_seed_same_bits(device: torch.device, rng: torch.Generator) -> None:
    """Fault: sums in the order in which blocks happen to finish."""
    grads = [torch.randn(300_001, generator=rng).to(device) for _ in range(3)]
    assert len({float(global_norm(grads)) for _ in range(5)}) == 1


def test_nonfinite_and_refusals(device: torch.device) -> None:
    """Fault: a NaN norm taken for small; a wrong argument taken."""
    p = Parameter(torch.zeros(3, device=device))
    p.grad = torch.tensor([1.0, float("nan"), 2.0], device=device)
    with pytest.raises(UsageError, match="nan"):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert float(p.grad[0]) == 1.0
    assert bool(clip_grad_norm_(p, 1.0).isnan()) and bool(p.grad.isnan().all())
    with pytest.raises(UsageError, match="norm_type"):
        clip_grad_norm_([p], 1.0, norm_type=1.0)
    with pytest.raises(UsageError, match="max_norm"):
        clip_grad_norm_([p], -1.0)
    assert float(clip_grad_norm_([Parameter(torch.ones(2))], 1.0)) == 0.0
    with pytest.raises(TensorError, match="layout"):
        global_norm([torch.eye(3).to_sparse()])
    with pytest.raises(DtypeError):
        global_norm([torch.ones(3, dtype=torch.int32)])


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """Fault: .item() somewhere, a millisecond of idle GPU each step."""
    params = [Parameter(torch.zeros(1000, device="cuda")) for _ in range(20)]
    for p in params:
        p.grad = torch.ones_like(p)
    clip_grad_norm_(params, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(params, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_in_a_graph() -> None:
    """Fault: a table uploaded from memory that is reused before the replay."""
    params = [Parameter(torch.zeros(1000, device="cuda")) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    clip_grad_norm_(params, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 1.0)
    for p in params:
        p.grad.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert float(norm) == pytest.approx(2.0 * 3000**0.5, rel=1e-6)
    assert float(global_norm([p.grad for p in params])) == pytest.approx(1.0, rel=1e-5)
