"""DeepSpeedCPUAdam: 2^27 elements (2^25 with --quick); against torch's fused CPU AdamW, DeepSpeed's own kernel where
its sources are given, and a STREAM triad of the same run as the ceiling.

Bytes: p, m and v are read and written, g is read: 28 an element in float32. Works are timed in turn.
DeepSpeed's kernel: point ``DS_BENCH_DEEPSPEED`` at a Python whose environment has DeepSpeed's sdist installed
(benchmarks/deepspeed_peer.py runs there, on the same sizes, between two runs of ours).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.fused_adam import SCALARS, parameters
from deepspeed_ops import cpu_adam
from deepspeed_ops.adam import DeepSpeedCPUAdam

OP = "cpu_adam"


def triad_gbps(n: int) -> float:
    """STREAM triad a = b + s * c with torch's threads, GB/s; 12 bytes an element, as STREAM counts."""
    a, b, c = (torch.rand(n) for _ in range(3))
    times = record.interleaved_us({"triad": lambda: torch.add(b, c, alpha=3.0, out=a)}, repeats=15)["triad"]
    return 12 * n / min(times) / 1e3


def verify() -> None:
    """Three steps agree with torch's AdamW in float64."""
    ours = parameters([(100_003,)], torch.float32, "cpu")
    reference = [torch.nn.Parameter(p.detach().double()) for p in ours]
    reference[0].grad = ours[0].grad.double()
    a, b = DeepSpeedCPUAdam(ours, **SCALARS), torch.optim.AdamW(reference, **SCALARS)
    for _ in range(3):
        a.step()
        b.step()
    error = ((ours[0].double() - reference[0]).abs() / (reference[0].abs() + 1e-3)).detach()
    assert float(error.max()) < 24 * torch.finfo(torch.float32).eps, float(error.max())


def one(n: int, dtype: torch.dtype, ceiling: float) -> dict[str, Any]:
    """One size and dtype; state in float32."""
    ours = parameters([(n,)], dtype, "cpu")
    optimizer = DeepSpeedCPUAdam(ours, **SCALARS)
    works = {"ours": optimizer.step}
    if dtype is torch.float32:
        theirs = [torch.nn.Parameter(ours[0].detach().clone())]
        theirs[0].grad = ours[0].grad
        works["torch_fused"] = torch.optim.AdamW(theirs, fused=True, **SCALARS).step
    times = record.interleaved_us(works, repeats=20)
    wide = 28 if dtype is torch.float32 else 3 * 2 + 4 * 4
    result = record.bandwidth(times.pop("ours"), wide * n, ceiling)
    peers: dict[str, Any] = {name: round(record.quartiles(t)[1], 1) for name, t in times.items()}
    peers.update(_deepspeed(n, dtype))
    facts = {"case": f"2^{n.bit_length() - 1} elements, float32 state", "simd": cpu_adam.simd_level()}
    return {
        "op": OP,
        **facts,
        "dtype": str(dtype)[6:],
        "elements": n,
        "threads": torch.get_num_threads(),
        **result,
        "peers": peers,
    }


def _deepspeed(n: int, dtype: torch.dtype) -> dict[str, Any]:
    python = os.environ.get("DS_BENCH_DEEPSPEED")
    if not python:
        return {}
    command = [*python.split(), str(Path(__file__).with_name("deepspeed_peer.py")), str(n), str(dtype)[6:]]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=900, check=False)
    if done.returncode:
        return {"deepspeed": None, "why": done.stderr.strip().splitlines()[-1:]}
    return {"deepspeed": json.loads(done.stdout.splitlines()[-1])["us"]}


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases."""
    verify()
    n = 2**25 if quick else 2**27
    ceiling = triad_gbps(n)
    records = [one(n, dtype, ceiling) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    facts = record.where(torch.device("cpu"))
    records = [{**r, **facts} for r in records]
    record.save(OP, records, folder)
    rows = [
        (
            r["case"],
            r["dtype"],
            r["simd"],
            f"{r['ours_us'] / 1e3:,.2f}",
            f"{r['gbps']:,.1f}",
            f"{100 * r['fraction']:.0f} %",
            str(r["peers"]),
        )
        for r in records
    ]
    record.table(
        f"cpu_adam on {facts['device']}", rows, ("case", "dtype", "level", "ms", "GB/s", "of triad", "peers, us")
    )
    return records
