"""The wheel to install: built once from the checkout, taken again where nothing of it changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from deepspeed_ops.op_builder.errors import CompileFailed, UsageError
from deepspeed_ops.op_builder.manifest import file_sha256

STAMP = ".ds_install.json"
# What decides the content of a wheel beside the checkout.
_VARIABLES = ("DS_", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "CC", "CXX", "CFLAGS", "CPPFLAGS", "LDFLAGS")
# Our own errors in pip's output: as setup.py prints them, or at the end of a traceback of the build backend.
_OURS = re.compile(r"error: (?!subprocess-exited)|[\w.]*\berrors\.\w+: ")
_LEAVINGS = {"build", "dist", "parts", "site", ".git", ".venv", "__pycache__"}


def find_checkout(start: Path) -> Path:
    """The checkout that holds this file, else the folder ``start``.

    Raises:
        UsageError: neither is one.
    """
    for root in (Path(__file__).resolve().parents[3], start):
        if (root / "setup.py").is_file() and (root / "op_builder").is_dir():
            return root
    raise UsageError(f"no checkout at {start}", "a wheel is built from one", "cd CHECKOUT, or --wheel FILE")


def wheel_of(
    root: Path, env: Mapping[str, str], options: Sequence[str], keep: bool, say: Callable[[str], None]
) -> Path:
    """The wheel of a checkout: the one in ``dist`` if checkout and environment are as they were, else a fresh one.

    So a second run has the same wheel, byte for byte, and hosts that have it are left alone.

    Args:
        root: the checkout.
        env: the environment of the build (``DS_BUILD_OPS`` and its kin).
        options: of pip, such as ``-v`` and ``-i URL``.
        keep: do not remove ``build``, ``dist`` and ``*.egg-info`` first.
        say: told what is done.

    Raises:
        CompileFailed: the build failed.
    """
    dist, state = root / "dist", digest(root, env)
    if (ready := _ready(dist, state)) is not None:
        say(f"nothing changed since {ready.name} was built: taking it")
        return ready
    if not keep:
        for leaving in (root / "build", dist, *root.glob("src/*.egg-info"), *root.glob("*.egg-info")):
            shutil.rmtree(leaving, ignore_errors=True)
    dist.mkdir(exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in dist.glob("*.whl")}
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--wheel-dir", str(dist)]
    say("building the wheel")
    done = subprocess.run(
        [*argv, *options, str(root)],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=None if "-v" in options else subprocess.PIPE,
        stderr=None if "-v" in options else subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=7200,
        check=False,
    )
    if done.returncode != 0:
        raise CompileFailed(
            "the wheel cannot be built", reason(done.stdout or ""), f"{sys.executable} -m pip wheel -v ."
        )
    made = [path for path in dist.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns]
    wheel = max(made or dist.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)
    stamp = {"state": state, "wheel": wheel.name, "sha256": file_sha256(wheel)}
    (dist / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
    return wheel


def reason(output: str) -> str:
    """The telling lines of a failed build: our own error where there is one, else pip's."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = next((i for i, line in enumerate(lines) if _OURS.match(line)), None)
    if ours is not None:
        return "\n".join([_OURS.sub("", lines[ours]), *lines[ours + 1 : ours + 3]])
    return next(
        (line.strip() for line in reversed(lines) if "rror" in line), lines[-1] if lines else "pip said nothing"
    )


def _ready(dist: Path, state: str) -> Path | None:
    try:
        stamp = json.loads((dist / STAMP).read_text(encoding="utf-8"))
        wheel = dist / str(stamp["wheel"])
        return wheel if stamp["state"] == state and file_sha256(wheel) == stamp["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def digest(root: Path, env: Mapping[str, str]) -> str:
    """Digest of a checkout's files and of what else decides its wheel."""
    seen = hashlib.sha256()
    for path in _files(root):
        seen.update(f"{path.relative_to(root).as_posix()}\0{file_sha256(path)}\0".encode())
    chosen = {k: v for k, v in env.items() if k.startswith(_VARIABLES)}
    head = root / ".git"
    git_state = ""
    if head.exists():  # the version holds the commit's hash
        from deepspeed_ops.version import git_state as ask

        git_state = "".join(ask(root))
    seen.update(json.dumps([chosen, sys.version, git_state], sort_keys=True).encode())
    return seen.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in _LEAVINGS and not n.endswith(".egg-info"))
        names[:] = [n for n in names if not n.startswith(".") and n not in ("benchmarks", "tests", "docs")]
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix not in (".pyc", ".png", ".log") and not path.is_symlink():
                yield path
