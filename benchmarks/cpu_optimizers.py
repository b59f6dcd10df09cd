"""What the benchmarks of DeepSpeedCPULion and DeepSpeedCPUAdagrad share."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.cpu_adam import triad_gbps
from benchmarks.fused_adam import parameters
from deepspeed_ops.cpu_op import simd_level


def deepspeed_us(optimizer: str, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's own op, where ``DS_BENCH_DEEPSPEED`` names a Python that has it."""
    python = os.environ.get("DS_BENCH_DEEPSPEED")
    if not python:
        return {}
    script = str(Path(__file__).with_name("deepspeed_peer.py"))
    done = subprocess.run(
        [*python.split(), script, str(n), str(dtype)[6:], optimizer],
        capture_output=True, encoding="utf-8", errors="replace", timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"deepspeed": None, "why": done.stderr.strip().splitlines()[-1:]}
    return {"deepspeed": json.loads(done.stdout.splitlines()[-1])["us"]}


def run_op(
    op: str,
    make: Callable[[Any], Any],
    peer: tuple[str, Callable[[Any], Any]],
    deepspeeds: str,
    folder: Path | None,
    quick: bool,
) -> list[dict[str, Any]]:
    """Float32 and bfloat16 parameters with float32 state; works are timed in turn.

    Bytes: p and the state are read and written, g is read: 20 an element in float32.
    """
    n = 2**25 if quick else 2**27
    ceiling = triad_gbps(n)
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters([(n,)], dtype, "cpu")
        works = {"ours": make(params).step}
        if dtype is torch.float32:
            theirs = [torch.nn.Parameter(params[0].detach().clone())]
            theirs[0].grad = params[0].grad
            works[peer[0]] = peer[1](theirs).step
        times = record.interleaved_us(works, repeats=12)
        wide = 20 if dtype is torch.float32 else 3 * 2 + 2 * 4
        result = record.bandwidth(times.pop("ours"), wide * n, ceiling)
        peers = {name: round(record.quartiles(t)[1], 1) for name, t in times.items()}
        facts = {"case": f"2^{n.bit_length() - 1} elements, float32 state", "simd": simd_level(op)}
        threads = {"threads": torch.get_num_threads()}
        more = deepspeed_us(deepspeeds, n, dtype)
        line = {"op": op, **facts, "dtype": str(dtype)[6:], "elements": n, **threads, **result}
        records.append({**line, "peers": {**peers, **more}})
    facts = record.where(torch.device("cpu"))
    records = [{**r, **facts} for r in records]
    record.save(op, records, folder)
    rows = [
        (r["case"], r["dtype"], r["simd"], f"{r['ours_us'] / 1e3:,.2f}", f"{r['gbps']:,.1f}",
         f"{100 * r['fraction']:.0f} %", str(r["peers"]))
        for r in records
    ]  # fmt: skip
    record.table(f"{op} on {facts['device']}", rows, ("case", "dtype", "level", "ms", "GB/s", "of triad", "peers, us"))
    return records
