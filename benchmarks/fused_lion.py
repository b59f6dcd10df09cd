"""FusedLion on a GPU: 2^30 elements, BERT-large shapes, 4,000 small tensors; against the plain formula in torch's
foreach (torch has no Lion), and a copy as the ceiling.

Bytes: p and m are read and written, g is read: 20 an element in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.fused_adam import parameters
from benchmarks.gpu_optimizers import Foreach, case, cases, report, small
from deepspeed_ops.lion import FusedLion

OP = "fused_lion"
SCALARS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01}
PASSES = 5


def ours(params: Any, **options: Any) -> FusedLion:
    """Our optimizer."""
    return FusedLion(params, **SCALARS, **options)


def peer(params: Any) -> Foreach:
    """The plain formula."""
    return Foreach(params, "lion", **SCALARS)


def verify(dtype: torch.dtype) -> None:
    """Three steps on the GPU give the bits of the CPU op; float32 also agrees with the plain formula."""
    shapes = [(1023,), (64, 33), (1,)]
    mine, plain = parameters(shapes, dtype), parameters(shapes, dtype)
    cpu = [torch.nn.Parameter(p.detach().cpu()) for p in mine]
    for p, q in zip(mine, cpu, strict=True):
        q.grad = p.grad.cpu()
    a, b, c = ours(mine), ours(cpu), peer(plain)
    before = [p.detach().clone() for p in mine]
    for _ in range(3):
        for optimizer in (a, b, c):
            optimizer.step()
    for p, q, r, old in zip(mine, cpu, plain, before, strict=True):
        assert p.numel() < 64 or not torch.equal(p, old), "nothing moved"
        assert torch.equal(p.cpu(), q), dtype
        assert dtype is not torch.float32 or torch.allclose(p, r, rtol=1e-5, atol=1e-6)


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases; skipped where there is no GPU."""
    if not torch.cuda.is_available():
        print("fused_lion: no CUDA device, not run")
        return []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        verify(dtype)
    peers = {"torch_foreach": peer}
    records = [case(OP, name, shapes, dtype, PASSES, ours, peers) for name, shapes, dtype in cases(quick)]
    return report(OP, [*records, *small(OP, PASSES, ours, peer)], folder)
