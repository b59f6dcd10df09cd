"""FusedLamb on a GPU: 2^30 elements, BERT-large shapes, 4,000 small tensors; against the plain formula in torch's
foreach (torch has no LAMB), and a copy as the ceiling. Also with max_grad_norm, beside torch's clip_grad_norm_.

Bytes: the first pass reads p, g, m, v and writes m, v, the second reads p, m, v and writes p: 40 an element in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.fused_adam import copy_gbps, parameters
from benchmarks.gpu_optimizers import Foreach, case, cases, report, small
from benchmarks.shapes import bert_large
from deepspeed_ops.clip_grad_norm import clip_grad_norm_
from deepspeed_ops.lamb import FusedLamb

OP = "fused_lamb"
SCALARS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
PASSES = 10


def ours(params: Any, **options: Any) -> FusedLamb:
    """Our optimizer."""
    return FusedLamb(params, **SCALARS, **options)


def peer(params: Any) -> Foreach:
    """The plain formula, without the limits of the ratio."""
    return Foreach(params, "lamb", **SCALARS)


def verify() -> None:
    """Three steps agree with the plain formula, whose ratios stay inside the limits here."""
    shapes = [(1023,), (64, 33), (70_000,)]
    mine, plain = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    a, b = ours(mine), peer(plain)
    for _ in range(3):
        a.step()
        b.step()
    assert all(0.01 < ratio < 10.0 for ratio in a.get_lamb_coeffs())
    for p, q, old in zip(mine, plain, parameters(shapes, torch.float32), strict=True):
        assert not torch.equal(p, old), "nothing moved"
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), float((p - q).abs().max())


def clipping() -> dict[str, Any]:
    """clip_grad_norm_ alone on BERT-large: the norm reads g, the scaling reads and writes it, 12 bytes an element."""
    params = parameters(bert_large(), torch.float32)
    moved = 12 * sum(p.numel() for p in params)
    kept = [p.grad.clone() for p in params]

    def again() -> None:  # so that there is something to clip each time
        torch._foreach_copy_([p.grad for p in params], kept)

    def timed(clip: Any) -> list[float]:
        both = record.quartiles(record.gpu_us(lambda: (again(), clip(params, 1.0))))
        alone = record.quartiles(record.gpu_us(again))[1]
        return [x - alone for x in both]

    times, theirs = timed(clip_grad_norm_), timed(torch.nn.utils.clip_grad_norm_)
    result = record.bandwidth([times[0], times[1], times[1], times[2]], moved, copy_gbps(moved))
    elements = moved // 12
    peers = {"torch_clip": round(theirs[1], 2)}
    return {
        "op": OP,
        "case": "clip_grad_norm_, BERT-large shapes",
        "dtype": "float32",
        "elements": elements,
        **result,
        "peers": peers,
    }


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases; skipped where there is no GPU."""
    if not torch.cuda.is_available():
        print("fused_lamb: no CUDA device, not run")
        return []
    verify()
    peers = {"torch_foreach": peer}
    records = [case(OP, name, shapes, dtype, PASSES, ours, peers) for name, shapes, dtype in cases(quick)]
    clipped = lambda params: ours(params, max_grad_norm=1.0)  # noqa: E731
    records.append(case(OP, "BERT-large shapes, max_grad_norm", bert_large(), torch.float32, PASSES + 1, clipped, {}))
    return report(OP, [*records, clipping(), *small(OP, PASSES, ours, peer)], folder)
