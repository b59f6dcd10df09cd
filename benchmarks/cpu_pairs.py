"""Our CPU optimizers against DeepSpeed's, in pairs of fresh processes.

``DS_BENCH_DEEPSPEED=PYTHON python -m benchmarks cpu_pairs``, where PYTHON has DeepSpeed installed.

Where memory lands differs from process to process and moves either side by up to 40 %, so one process each proves
nothing: each pair is measured ROUNDS times, in turn, by the same script (deepspeed_peer.py; both packages have the same
module paths), and the medians over the rounds are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

ROUNDS = 5
SCRIPT = Path(__file__).with_name("deepspeed_peer.py")


def once(python: str, kind: str, dtype: str, n: int) -> float:
    """Median step of one fresh process, us."""
    command = [python, str(SCRIPT), str(n), dtype, kind]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=600, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["us"])


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases; nothing where DeepSpeed's Python is not given."""
    theirs = os.environ.get("DS_BENCH_DEEPSPEED")
    if not theirs:
        print("cpu_pairs: DS_BENCH_DEEPSPEED names no Python, not run")
        return []
    n, rounds = 2**25, 3 if quick else ROUNDS
    records = []
    for kind in ("adam", "lion", "adagrad"):
        for dtype in ("float32", "bfloat16"):
            pairs = [(once(sys.executable, kind, dtype, n), once(theirs, kind, dtype, n)) for _ in range(rounds)]
            ours, peer = (statistics.median(x) for x in zip(*pairs, strict=True))
            facts = {"case": f"{kind}, 2^25 elements, float32 state", "dtype": dtype, "elements": n, "rounds": pairs}
            records.append({"op": "cpu_pairs", **facts, "ours_us": ours, "peers": {"deepspeed": peer}})
    where = record.where(torch.device("cpu"))
    records = [{**r, **where} for r in records]
    record.save("cpu_pairs", records, folder)
    rows = []
    for r in records:
        mine, peer = r["ours_us"], r["peers"]["deepspeed"]
        rows.append((r["case"], r["dtype"], f"{mine:,.0f}", f"{peer:,.0f}", f"{peer / mine:.2f}"))
    record.table(
        "ours and DeepSpeed, fresh processes in turn", rows, ("case", "dtype", "ours, us", "DeepSpeed, us", "ratio")
    )
    return records
