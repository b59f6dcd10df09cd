"""What a user waits for: importing the package, building an op in an empty store, the first use of a prebuilt one.

Each figure is the median over fresh processes; ``seconds`` takes the place of bandwidth in these records.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

_CLOCK = "import time, json; t = time.perf_counter()\n{work}\nprint(json.dumps(time.perf_counter() - t))"
# torch's import leaves a whole collection of its objects due (90 ms); it is made before the clock starts, since it
# comes at the next few hundred allocations of any code.
_READY = "import gc, torch, tvm_ffi; gc.collect()\n"
_HOST = "from deepspeed_ops.op_builder import loader; loader.host_module({op!r})"
_STEP = (
    "from deepspeed_ops.adam import FusedAdam\n"
    "p = torch.nn.Parameter(torch.ones(8, device='cuda')); p.grad = torch.ones_like(p)\n"
    # torch's own optimizer first: what any optimizer's first step imports (torch._dynamo, 0.8 s) is torch's.
    "torch.optim.AdamW([p]).step(); torch.cuda.synchronize(); gc.collect()\n"
)
_GPU_PART = (
    "from deepspeed_ops.op_builder import loader; c = torch.cuda.get_device_capability()\n"
    "loader.device_image('fused_adam', 0, c, tuple(map(int, torch.version.cuda.split('.'))))"
)


def seconds(before: str, work: str, store: str | None, runs: int) -> float:
    """Median seconds of ``work`` in fresh processes; an empty store for each where ``store`` is None."""
    times = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as empty:
            env = {**os.environ, "TORCH_EXTENSIONS_DIR": store or empty, "PYTHONDONTWRITEBYTECODE": ""}
            code = before + _CLOCK.format(work=work)
            done = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            times.append(json.loads(done.stdout.splitlines()[-1]))
    return statistics.median(times)


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases that this machine can run."""
    runs = 3 if quick else 7
    cases = {"import deepspeed": seconds("", "import deepspeed", None, runs)}
    with tempfile.TemporaryDirectory() as store:
        cases["cold JIT, host part of cpu_adam"] = seconds(_READY, _HOST.format(op="cpu_adam"), None, 3)
        seconds(_READY, _HOST.format(op="cpu_adam"), store, 1)
        cases["first use of prebuilt cpu_adam, beyond torch and tvm_ffi"] = seconds(
            _READY, _HOST.format(op="cpu_adam"), store, runs
        )
        if torch.cuda.is_available():
            ready = _READY + "torch.cuda.init(); torch.zeros(1, device='cuda'); torch.cuda.synchronize()\n"
            cases["cold JIT, GPU part of fused_adam"] = seconds(ready, _GPU_PART, None, runs)
            work = "FusedAdam([p]).step(); torch.cuda.synchronize()"
            seconds(ready + _STEP, work, store, 1)
            cases["first step of prebuilt fused_adam, after import"] = seconds(ready + _STEP, work, store, runs)
    facts = record.where(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    base = {
        "op": "startup",
        "dtype": None,
        "ours_us": None,
        "bytes": None,
        "ceiling_gbps": None,
        "fraction": None,
        "peers": {},
    }
    records = [{**base, "case": case, "seconds": round(s, 4), **facts} for case, s in cases.items()]
    record.save("startup", records, folder)
    record.table("start-up", [(case, f"{1e3 * s:,.1f}") for case, s in cases.items()], ("case", "ms"))
    return records
