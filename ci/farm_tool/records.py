"""What the farm built: one JSON file a cell or set, written whole, read by ``list``, ``plan`` and the report."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from op_builder.files import FILES

from .home import ROOT, Farm
from .parts import Done

# Records that are of no single cell.
SETS = ("ship-set", "cell-set")
RESULTS = ROOT / "benchmarks" / "results"


def commit(home: Path = ROOT) -> str:
    """The commit of the checkout, ``+`` appended where files differ from it; "" outside one."""
    git = ["git", "-c", f"safe.directory={home}", "-C", str(home)]

    def ask(*words: str) -> str:
        try:
            done = subprocess.run(
                [*git, *words], capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            return ""
        return done.stdout.strip()

    known = ask("rev-parse", "--short", "HEAD")
    changed = [line for line in ask("status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
    return known + ("+" if changed else "")


def of_parts(rows: Sequence[Done], seconds: float) -> dict[str, Any]:
    """The record of a set of parts."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "hits": sum(row.hit for row in rows),
        "built": sum(not row.hit for row in rows),
        "bytes": sum(row.size for row in rows),
        "parts": [row.as_dict() for row in rows],
    }


def write(farm: Farm, name: str, record: Mapping[str, Any]) -> None:
    """Keep a record under the name of its cell or set."""
    farm.records.mkdir(parents=True, exist_ok=True)
    whole = FILES.write_text  # UTF-8 by itself
    whole(farm.records / f"{name}.json", json.dumps(record, indent=1) + "\n")


def read(farm: Farm, name: str) -> dict[str, Any] | None:
    """The record of a cell or set; None where there is none, or one that cannot be read."""
    try:
        found = json.loads((farm.records / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def publish(case: str, record: Mapping[str, Any]) -> Path:
    """Append figures of a run to ``benchmarks/results/farm.json``; parts are counted there, not listed."""
    path, count = RESULTS / "farm.json", len(record["parts"])
    if not case.startswith("image"):
        case += f", {record['built']} of {count} parts compiled"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = {k: v for k, v in record.items() if k != "parts"}
    lines = [json.dumps(r, ensure_ascii=False) for r in [*known, {"op": "farm", "case": case, **machine(), **kept}]]
    path.write_text("[" + ",\n ".join(lines) + "]\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """CPU and cores of this machine, and how busy it was (processes that could run, over the last five minutes)."""
    return {"device": cpu_name(), "load": round(os.getloadavg()[1], 1)}


def cpu_name() -> str:
    """The CPU's name and how many this process may use."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"
