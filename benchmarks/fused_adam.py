"""FusedAdam on a GPU: 2^30 elements, BERT-large shapes, 4,000 small tensors; against torch, and a copy as the ceiling.

Bytes: p, m and v are read and written, g is read: 28 an element in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.shapes import bert_large
from deepspeed_ops.adam import FusedAdam

OP = "fused_adam"
SCALARS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str = "cuda") -> list[torch.nn.Parameter]:
    """Parameters with gradients, both random; equal for equal shapes."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device, generator=generator))
        p.grad = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        made.append(p)
    return made


def copy_gbps(moved_bytes: float) -> float:
    """What a device-to-device copy of as many bytes reaches, read and written bytes counted."""
    n = int(min(moved_bytes, 2**34)) // 8
    source, target = torch.rand(n, device="cuda"), torch.empty(n, device="cuda")
    return n * 8 / record.quartiles(record.gpu_us(lambda: target.copy_(source)))[1] / 1e3


def verify(dtype: torch.dtype) -> None:
    """Three steps agree with torch in float64 to 24 eps; half formats, moments too, with our CPU kernel bit for bit."""
    shapes = [(1023,), (64, 33), (1,)]
    ours, before = parameters(shapes, dtype), parameters(shapes, dtype)
    if dtype in (torch.float32, torch.float64):
        others = [torch.nn.Parameter(p.detach().double()) for p in before]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(others, **SCALARS)
    else:
        others = [torch.nn.Parameter(p.detach().cpu()) for p in before]
        optimizer = FusedAdam(others, **SCALARS)
    for p, q in zip(ours, others, strict=True):
        q.grad = p.grad.to(q.device, q.dtype)
    mine = FusedAdam(ours, **SCALARS)
    for _ in range(3):
        mine.step()
        optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(ours[:2], before[:2], strict=True)), "nothing moved"
    for p, q in zip(ours, others, strict=True):
        if q.dtype is dtype and dtype is not torch.float64:
            assert torch.equal(p.cpu(), q), dtype
        else:
            error = float(((p.double() - q).abs() / (q.abs() + 1e-3)).max().detach())
            assert error < 24 * torch.finfo(dtype).eps, (dtype, error)


def one(
    case: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, peers: dict[str, Callable[..., Any]]
) -> dict[str, Any]:
    """One case: ours and the peers by device time, from Python's step()."""
    n = sum(torch.Size(s).numel() for s in shapes)
    moved_bytes = 7 * n * torch.finfo(dtype).bits // 8
    ceiling = copy_gbps(moved_bytes)
    params = parameters(shapes, dtype)
    optimizer = FusedAdam(params, **SCALARS)
    result = record.bandwidth(record.gpu_us(optimizer.step), moved_bytes, ceiling)
    del optimizer
    timed: dict[str, Any] = {}
    for name, make in peers.items():
        torch.cuda.empty_cache()
        try:
            peer = make(params, **SCALARS)
            timed[name] = round(record.quartiles(record.gpu_us(peer.step, repeats=30))[1], 2)
            del peer
        except torch.cuda.OutOfMemoryError:
            timed[name] = None
    return {"op": OP, "case": case, "dtype": str(dtype)[6:], "elements": n, **result, "peers": timed}


def loop_us(step: Callable[[], Any], steps: int = 40, loops: int = 9) -> list[float]:
    """Wall time of one step, us, in loops of steps: what training waits for, be it host or device."""
    times = []
    for _ in range(loops):
        step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps * 1e6)
    return times


def small_tensors() -> list[dict[str, Any]]:
    """4,000 tensors of 768: the host's time in eager mode, the device's under a CUDA graph."""
    shapes: list[tuple[int, ...]] = [(768,)] * 4000
    params, moved_bytes = parameters(shapes, torch.float32), 28 * 768 * 4000
    eager = {}
    for name, options in (("", {}), (", fixed_storage", {"fixed_storage": True})):
        optimizer = FusedAdam(params, **SCALARS, **options)
        eager[name] = record.bandwidth(loop_us(optimizer.step), moved_bytes, None)
    peers = {}
    for name, options in (("torch_fused", {"fused": True}), ("torch_foreach", {"foreach": True})):
        peer = torch.optim.AdamW(params, **SCALARS, **options)
        peers[name] = round(record.quartiles(loop_us(peer.step, 10))[1], 2)
    captured = FusedAdam(params, **SCALARS, capturable=True)
    captured.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    replay = record.bandwidth(record.gpu_us(graph.replay), moved_bytes, None)
    base = {"op": OP, "dtype": "float32", "elements": 768 * 4000}
    return [
        *(
            {**base, "case": f"4,000 tensors of 768, eager, a step in a loop{n}", **t, "peers": peers}
            for n, t in eager.items()
        ),
        {**base, "case": "4,000 tensors of 768, CUDA graph, device time", **replay, "peers": {}},
    ]


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases; skipped where there is no GPU."""
    if not torch.cuda.is_available():
        print("fused_adam: no CUDA device, not run")
        return []
    torch_fused = lambda p, **k: torch.optim.AdamW(p, fused=True, **k)  # noqa: E731
    torch_foreach = lambda p, **k: torch.optim.AdamW(p, foreach=True, **k)  # noqa: E731
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        verify(dtype)
    records = [
        one(
            "BERT-large shapes",
            bert_large(),
            torch.float32,
            {"torch_fused": torch_fused, "torch_foreach": torch_foreach},
        )
    ]
    records.append(one("BERT-large shapes", bert_large(), torch.bfloat16, {"torch_fused": torch_fused}))
    if not quick:
        records.append(one("2^30 elements", [(2**30,)], torch.float32, {"torch_fused": torch_fused}))
    records += small_tensors()
    facts = record.where(torch.device("cuda"))
    records = [{**r, **facts} for r in records]
    record.save(OP, records, folder)
    rows = [
        (r["case"], r["dtype"], f"{r['ours_us']:,.1f}", f"{r['gbps']:,.0f}", _percent(r), _peers(r)) for r in records
    ]
    record.table(f"fused_adam on {facts['device']}", rows, ("case", "dtype", "us", "GB/s", "of copy", "peers, us"))
    return records


def _percent(r: dict[str, Any]) -> str:
    return "" if r["fraction"] is None else f"{100 * r['fraction']:.1f} %"


def _peers(r: dict[str, Any]) -> str:
    return ", ".join(f"{name} {us:,.0f}" if us else f"{name} out of memory" for name, us in r["peers"].items())
