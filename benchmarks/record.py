"""One record a case: what ran, where, how fast, beside which ceiling and peers. ``results/<op>.json``, newest last."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent


def git(*args: str) -> str:
    """A git command's output, or "" outside a checkout."""
    done = subprocess.run(
        ["git", *args], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    return done.stdout.strip()


def commit() -> tuple[str, bool]:
    """Commit, and whether the tree differs; ``DS_BENCH_COMMIT`` (``hash`` or ``hash+dirty``) where git is absent."""
    said = os.environ.get("DS_BENCH_COMMIT")
    if said:
        return said.removesuffix("+dirty"), said.endswith("+dirty")
    changed = [x for x in git("status", "--porcelain").splitlines() if "benchmarks/results/" not in x]
    return git("rev-parse", "--short", "HEAD"), bool(changed)


def cpu_name() -> str:
    """The CPU's name and how many this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {count} CPUs"


def where(device: torch.device) -> dict[str, Any]:
    """Device, host, driver, torch, commit, dirty flag and date."""
    driver = None
    if device.type == "cuda":
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    sha, dirty = commit()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "host": cpu_name(),
        "driver": driver,
        "torch": torch.__version__,
        "commit": sha,
        "dirty": dirty,
        "date": datetime.date.today().isoformat(),
    }


def gpu_us(
    work: Callable[[], Any], repeats: int = 40, warm_up: int = 5, flush: torch.Tensor | None = None
) -> list[float]:
    """Device time of each call, us, by events; ``flush`` is overwritten before each call to empty the L2 cache."""
    for _ in range(warm_up):
        work()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in pairs:
        if flush is not None:
            flush.zero_()
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]


def wall_us(work: Callable[[], Any], repeats: int = 40, warm_up: int = 5) -> list[float]:
    """Wall time of each call until it returns, us; the device is idle before each where there is one."""
    times = []
    for i in range(warm_up + repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if i >= warm_up:
            times.append((time.perf_counter() - start) * 1e6)
    return times


def interleaved_us(works: dict[str, Callable[[], Any]], repeats: int = 30, warm_up: int = 2) -> dict[str, list[float]]:
    """Wall time of several works taken in turn, so that a change of the machine meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(warm_up + repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if i >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e6)
    return times


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, median, high = statistics.quantiles(times, n=4)
    return low, median, high


def bandwidth(times_us: list[float], moved_bytes: float, ceiling_gbps: float | None) -> dict[str, Any]:
    """Median and quartiles in us, GB/s, and the fraction of the ceiling."""
    low, median, high = quartiles(times_us)
    gbps = moved_bytes / median / 1e3
    return {
        "ours_us": round(median, 2),
        "quartiles_us": [round(low, 2), round(high, 2)],
        "bytes": int(moved_bytes),
        "gbps": round(gbps, 1),
        "ceiling_gbps": None if ceiling_gbps is None else round(ceiling_gbps, 1),
        "fraction": None if ceiling_gbps is None else round(gbps / ceiling_gbps, 4),
    }


def save(op: str, records: list[dict[str, Any]], folder: Path | None = None) -> Path:
    """Append records to ``results/<op>.json`` (or to that name in ``folder``)."""
    path = (folder or RESULTS) / f"{op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    lines = ",\n ".join(json.dumps(r, ensure_ascii=False) for r in [*known, *records])
    path.write_text(f"[{lines}]\n", encoding="utf-8")
    return path


def table(title: str, rows: list[tuple[str, ...]], head: tuple[str, ...]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        out.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        out.add_row(*row)
    Console(width=120).print(out)
