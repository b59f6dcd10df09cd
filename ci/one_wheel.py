"""One wheel, many torches: ``python ci/one_wheel.py WHEEL PYTHON...`` runs WHEEL beside each PYTHON's torch.

Each PYTHON is the interpreter of an environment that has torch (any from 2.4 on) and the wheel's small dependencies.
The wheel goes into a folder of its own, the PATH is emptied of compilers, and ``DS_JIT=0`` forbids building. Five AdamW
steps of each class and dtype must give the same bits everywhere. Appends to ``benchmarks/results/one_wheel.json``.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVE = """
import hashlib, json, platform, sys, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_ops.op_builder import loader
digests = []
for kind in (DeepSpeedCPUAdam, FusedAdam):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        n = 100_003
        i = torch.arange(n)
        p = torch.nn.Parameter(((i * 7919 % 1021 - 510) / 512).to(dtype))
        optimizer = kind([p], lr=1e-2, weight_decay=1e-2)
        for step in range(1, 6):
            p.grad = ((i * 104729 % 2039 - 1019) / 1024 * step).to(dtype)
            optimizer.step()
        digests.append(hashlib.sha256(p.detach().view(torch.uint8).numpy().tobytes()).hexdigest())
part = loader.Loader().resolution("cpu_adam").choice.part
versions = {"python": platform.python_version(), "torch": torch.__version__}
print(json.dumps({**versions, "tvm_ffi": sys.modules["tvm_ffi"].__version__,
    "part_sha256": part.manifest.sha256, "origin": part.origin, "digests": digests}))
"""


def main() -> int:
    """Install, run, compare; 0 when all agree."""
    wheel, pythons = Path(sys.argv[1]).resolve(), sys.argv[2:]
    found = []
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{folder}/site", str(wheel)]
            subprocess.run(pip, check=True)
            Path(folder, "empty").mkdir()
            kept = {k: v for k, v in os.environ.items() if k in ("LANG", "TMPDIR")}
            env = {**kept, "PATH": f"{folder}/empty", "HOME": folder, "PYTHONPATH": f"{folder}/site", "DS_JIT": "0"}
            command = [python, "-c", DRIVE]
            done = subprocess.run(command, env=env, cwd=folder, capture_output=True, encoding="utf-8", check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print({k: v for k, v in found[-1].items() if k != "digests"}, found[-1]["digests"][0][:12])
    agree = len({tuple(f["digests"]) for f in found}) == 1 and len({f["part_sha256"] for f in found}) == 1
    print("equal bits" if agree else "DIFFERENT BITS", "in", len(found), "environments")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, encoding="utf-8")
    record = {"op": "one_wheel", "case": wheel.name, "equal_bits": agree, "environments": found}
    record |= {"commit": commit.stdout.strip(), "date": datetime.date.today().isoformat()}
    path = ROOT / "benchmarks" / "results" / "one_wheel.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.write_text(json.dumps([*known, record], indent=1) + "\n", encoding="utf-8")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
