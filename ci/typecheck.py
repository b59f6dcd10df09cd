"""``mypy --strict`` on the packages as they are installed.

``op_builder`` lies at the top of a checkout and inside ``deepspeed_ops`` in a wheel. A type checker follows no import
hook, so the installed layout is laid out in ``build/typecheck`` and checked there; messages name the files of the
checkout again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / "build" / "typecheck"
WHERE = {"deepspeed_ops/op_builder": "op_builder", "deepspeed": "src/deepspeed", "deepspeed_ops": "src/deepspeed_ops"}


def main(arguments: list[str]) -> int:
    """Lay out, check, translate; mypy's exit code."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for target in ("deepspeed", "deepspeed_ops", "deepspeed_ops/op_builder"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / WHERE[target], STAGE / target, ignore=ignored, dirs_exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments, "."],
        cwd=STAGE,
        env={**os.environ, "MYPYPATH": str(STAGE)},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=900,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    for line in (done.stdout + done.stderr).splitlines():
        path = next((p for p in WHERE if line.replace(os.sep, "/").startswith(p + "/")), "")
        sys.stdout.write((WHERE[path] + line[len(path) :] if path else line) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
