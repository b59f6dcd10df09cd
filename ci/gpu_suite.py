"""Run what CI cannot on a machine with a GPU, and write the record: ``python ci/gpu_suite.py OUT [STEP...]``.

Steps: ``tests`` (marker gpu), ``large`` (more than 2^31 elements), ``cpu`` (the op tests on this host's SIMD levels),
``memcheck`` and ``racecheck`` (compute-sanitizer over ci/sanitizer_workload.py), ``sources`` (every architecture's
source by every NVRTC of the folders in ``DS_NVRTC_FOLDERS``, ci/gpu_sources.py), ``bench``. Default: all of them.
``OUT`` gets one log a step, the benchmarks' JSON, and ``gpu_suite.json``: a record a step, to be appended to
``benchmarks/results/gpu_suite.json`` with :func:`benchmarks.record.save`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
SANITIZER = ["compute-sanitizer", "--error-exitcode=9"]
WORKLOAD = [sys.executable, str(ROOT / "ci" / "sanitizer_workload.py")]
_FOLDERS = [f for f in os.environ.get("DS_NVRTC_FOLDERS", "").split(os.pathsep) if f]
STEPS: dict[str, tuple[list[str], int]] = {
    "tests": ([*PYTEST, "tests", "-m", "gpu and not large"], 240),
    "large": ([*PYTEST, "tests/ops", "-m", "large"], 120),
    "cpu": ([*PYTEST, "tests/ops", "-m", "not gpu", "-k", "level or cpu_adam or conversion"], 240),
    "memcheck": ([*SANITIZER, "--tool=memcheck", *WORKLOAD], 240),
    "racecheck": ([*SANITIZER, "--tool=racecheck", *WORKLOAD], 240),
    "sources": ([sys.executable, str(ROOT / "ci" / "gpu_sources.py"), *_FOLDERS], 300),
    "bench": ([sys.executable, "-m", "benchmarks"], 300),
}


def main() -> int:
    """Run the steps; 0 when all passed."""
    out, wanted = Path(sys.argv[1]), sys.argv[2:] or list(STEPS)
    out.mkdir(parents=True, exist_ok=True)
    import torch

    from benchmarks import record

    facts = record.where(torch.device("cuda"))
    records, failed = [], 0
    for step in wanted:
        command, limit_s = STEPS[step]
        command = [*command, "--out", str(out)] if step == "bench" else command
        log, start = out / f"{step}.log", time.monotonic()
        with log.open("w", encoding="utf-8") as stream:
            try:
                rc = subprocess.run(
                    command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=limit_s
                ).returncode
            except subprocess.TimeoutExpired:
                rc = 124
        text = log.read_text(encoding="utf-8", errors="replace")
        counts = {
            name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|deselected|error)", text[-2000:])
        }
        errors = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", text)
        seconds = round(time.monotonic() - start, 1)
        made = {"op": "gpu_suite", "case": step, "rc": rc, "seconds": seconds, **counts, "summary": errors, **facts}
        # What ran, a record per compiler release, as ci/farm's report reads it.
        ran = json.loads(text.splitlines()[-1]) if step == "sources" and rc == 0 else [None]
        records += [{**made, "ran": one} if one else made for one in ran]
        failed += rc != 0
        print(step, "rc", rc, f"{seconds} s", counts, *errors, flush=True)
        if rc:
            print("\n".join(text.splitlines()[-40:]), flush=True)
    (out / "gpu_suite.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
