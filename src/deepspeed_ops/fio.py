"""fio as the yardstick: the same engine, block size, depth and threads on the same file."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ops.op_builder.errors import OpsError

ENGINES = {"io_uring": "io_uring", "libaio": "libaio", "threads": "psync"}  # our backend -> fio's engine


class FioFailed(OpsError):
    """fio is not installed, or failed."""

    exit_code = 47


@dataclass(frozen=True)
class FioResult:
    """Bytes, seconds, processor seconds, and the mean completion latency of a transfer in microseconds."""

    nbytes: int
    seconds: float
    cpu_s: float
    latency_us: float


def find_fio() -> Path | None:
    """The program, None where it is not installed."""
    found = shutil.which("fio")
    return Path(found) if found else None


def has_equal(backend: str, queue_depth: int) -> bool:
    """Whether fio has an engine that does what this backend does at this depth; ``psync`` knows only 1."""
    return backend in ENGINES and (backend != "threads" or queue_depth == 1)


def command(
    fio: Path, path: Path, write: bool, size: int, block_size: int, queue_depth: int, threads: int, backend: str,
    runtime_s: float | None = None, random: bool = False, memory: str = "malloc",
) -> list[str]:  # fmt: skip
    """fio's command line for one measurement; each thread has a part of the file of its own.

    Args:
        fio: the program.
        path: an existing file of at least ``size`` bytes.
        write: or read.
        size: bytes in all, a multiple of ``threads * block_size``.
        block_size: bytes a transfer.
        queue_depth: transfers in flight a thread.
        threads: at once.
        backend: ours, one that :func:`has_equal`.
        runtime_s: stop after so long.
        random: at random places instead of one after the other.
        memory: fio's name for the kind of memory it transfers from and to.
    """
    part = size // threads
    words = {
        "name": "ds_io", "filename": path, "rw": ("rand" if random else "") + ("write" if write else "read"),
        "direct": 1, "bs": block_size, "iodepth": queue_depth, "ioengine": ENGINES[backend],
        "size": part, "numjobs": threads, "offset_increment": part, "thread": 1, "group_reporting": 1,
        "output-format": "json", "fallocate": "none", "overwrite": 0, "invalidate": 0, "mem": memory,
        # As we do, it sends memory as it is: rewriting it before each write costs time, and leaves it in the cache.
        "scramble_buffers": 0,
    }  # fmt: skip
    if runtime_s is not None:
        words["runtime"] = f"{runtime_s:g}s"
    return [str(fio), *(f"--{key}={value}" for key, value in words.items())]


def run(argv: list[str], timeout_s: float = 300.0) -> FioResult:
    """Run a command of :func:`command`.

    Raises:
        FioFailed: it ended with an error, or reports one.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise FioFailed("fio did not finish", str(exc), "") from exc
    begin = done.stdout.find("{")
    if done.returncode != 0 or begin < 0:
        raise FioFailed("fio failed", (done.stderr or done.stdout).strip()[-400:], " ".join(argv))
    job = json.loads(done.stdout[begin:])["jobs"][0]
    side = job["write" if "write" in next(a for a in argv if a.startswith("--rw=")) else "read"]
    if job.get("error") or not side["io_bytes"]:
        raise FioFailed("fio reports an error", f"error {job.get('error')}, {side['io_bytes']} bytes", " ".join(argv))
    seconds = side["runtime"] / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job.get("job_runtime", side["runtime"]) / 1e3
    return FioResult(side["io_bytes"], seconds, cpu, side["clat_ns"]["mean"] / 1e3)
