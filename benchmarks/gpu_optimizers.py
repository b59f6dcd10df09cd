"""What the benchmarks of FusedLion and FusedLamb share: cases, and the plain formula in torch's foreach as a peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.fused_adam import _peers, _percent, copy_gbps, loop_us, parameters
from benchmarks.shapes import bert_large

Shapes = list[tuple[int, ...]]


class Foreach(torch.optim.Optimizer):
    """Lion or LAMB as a torch user writes them without kernels of his own: lists of tensors, one operation each."""

    def __init__(self, params: Any, kind: str, **options: Any) -> None:
        super().__init__(params, {"betas": (0.9, 0.999), "eps": 1e-8, **options})
        self.kind, self.t = kind, 0
        self.params = self.param_groups[0]["params"]
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params] if kind == "lamb" else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        self.t += 1
        getattr(self, f"_{self.kind}")([p.grad for p in self.params], self.param_groups[0])

    def _lion(self, g: Any, group: Any) -> None:
        beta1, beta2 = group["betas"]
        update = torch._foreach_mul(self.m, beta1)
        torch._foreach_add_(update, g, alpha=1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_mul_(self.params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(self.params, update, alpha=-group["lr"])
        torch._foreach_mul_(self.m, beta2)
        torch._foreach_add_(self.m, g, alpha=1 - beta2)

    def _lamb(self, g: Any, group: Any) -> None:
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(self.m, beta1)
        torch._foreach_add_(self.m, g, alpha=1 - beta1)
        torch._foreach_mul_(self.v, beta2)
        torch._foreach_addcmul_(self.v, g, g, value=1 - beta2)
        update = torch._foreach_sqrt(self.v)
        torch._foreach_add_(update, group["eps"])
        torch._foreach_reciprocal_(update)
        torch._foreach_mul_(update, self.m)
        torch._foreach_add_(update, self.params, alpha=group["weight_decay"])
        ratios = torch._foreach_div(torch._foreach_norm(self.params), torch._foreach_norm(update))
        size = group["lr"] * math.sqrt(1 - beta2**self.t) / (1 - beta1**self.t)
        torch._foreach_mul_(ratios, -size)
        torch._foreach_mul_(update, ratios)
        torch._foreach_add_(self.params, update)


def case(
    op: str,
    name: str,
    shapes: Shapes,
    dtype: torch.dtype,
    passes: int,
    make: Callable[[Any], Any],
    peers: dict[str, Callable[[Any], Any]],
) -> dict[str, Any]:
    """One case: ours and the peers by device time, from Python's step().

    Args:
        passes: elements read and written for each parameter's element.
    """
    n = sum(torch.Size(s).numel() for s in shapes)
    moved = passes * n * torch.finfo(dtype).bits // 8
    ceiling = copy_gbps(moved)
    params = parameters(shapes, dtype)
    optimizer = make(params)
    result = record.bandwidth(record.gpu_us(optimizer.step), moved, ceiling)
    del optimizer
    timed: dict[str, Any] = {}
    for peer_name, build in peers.items():
        torch.cuda.empty_cache()
        try:
            peer = build(params)
            timed[peer_name] = round(record.quartiles(record.gpu_us(peer.step, repeats=30))[1], 2)
            del peer
        except torch.cuda.OutOfMemoryError:
            timed[peer_name] = None
    return {"op": op, "case": name, "dtype": str(dtype)[6:], "elements": n, **result, "peers": timed}


def small(op: str, passes: int, make: Callable[..., Any], peer: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """4,000 tensors of 768: the host's time in eager mode, the device's under a CUDA graph."""
    shapes: Shapes = [(768,)] * 4000
    params, moved = parameters(shapes, torch.float32), 4 * passes * 768 * 4000
    base = {"op": op, "dtype": "float32", "elements": 768 * 4000}
    eager = record.bandwidth(loop_us(make(params).step), moved, None)
    plain = round(record.quartiles(loop_us(peer(params).step, 10))[1], 2)
    captured = make(params, capturable=True)
    captured.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    replay = record.bandwidth(record.gpu_us(graph.replay), moved, None)
    return [
        {**base, "case": "4,000 tensors of 768, eager, a step in a loop", **eager, "peers": {"torch_foreach": plain}},
        {**base, "case": "4,000 tensors of 768, CUDA graph, device time", **replay, "peers": {}},
    ]


def report(op: str, records: list[dict[str, Any]], folder: Path | None) -> list[dict[str, Any]]:
    """Save and print."""
    facts = record.where(torch.device("cuda"))
    records = [{**r, **facts} for r in records]
    record.save(op, records, folder)
    rows = [
        (r["case"], r["dtype"], f"{r['ours_us']:,.1f}", f"{r['gbps']:,.0f}", _percent(r), _peers(r)) for r in records
    ]
    record.table(f"{op} on {facts['device']}", rows, ("case", "dtype", "us", "GB/s", "of copy", "peers, us"))
    return records


def cases(quick: bool) -> list[tuple[str, Shapes, torch.dtype]]:
    """Names, shapes and dtypes."""
    some: list[tuple[str, Shapes, torch.dtype]] = [
        ("BERT-large shapes", bert_large(), torch.float32),
        ("BERT-large shapes", bert_large(), torch.bfloat16),
    ]
    return some if quick else [*some, ("2^30 elements", [(2**30,)], torch.float32)]
