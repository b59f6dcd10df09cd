"""What has run on a GPU, read from the records of ``ci/gpu_suite.py`` in ``benchmarks/results``.

A record counts if it ended well (``rc`` 0). Two forms tell architectures: a key ``ran`` (``release``, and lists of
variants under ``sass`` and ``ptx``), or a case's words ``source of sm_AA BB through its PTX (NVRTC X.Y)``. A record of
the GPU tests themselves counts as machine code of the device it names, by the CUDA release of its torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from op_builder.cells import Cell
from op_builder.matrix import load

_PTX = re.compile(r"source of sm_([\d ]+?) through its PTX \(NVRTC (\d+\.\d+)\)")
_TESTS = ("tests", "marker gpu")


@dataclass(frozen=True)
class GpuRun:
    """One thing that ran: an architecture's code, as machine code or through its PTX, by one CUDA release."""

    variant: str
    kind: str
    release: str
    device: str
    commit: str
    date: str
    case: str


def read(folder: Path) -> list[GpuRun]:
    """Every run that the records of a folder prove."""
    found: list[GpuRun] = []
    for path in sorted(folder.glob("*.json")):
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        found += runs_of(row for row in rows if isinstance(row, dict)) if isinstance(rows, list) else []
    return found


def runs_of(rows: Iterable[Mapping[str, Any]]) -> list[GpuRun]:
    """The runs that records prove."""
    found: list[GpuRun] = []
    for row in rows:
        if row.get("rc") != 0 or row.get("op") != "gpu_suite" or not row.get("driver"):
            continue
        facts = {k: str(row.get(k, "")) for k in ("device", "commit", "date", "case")}
        said, match = row.get("ran") or {}, _PTX.search(facts["case"])
        for kind in ("sass", "ptx"):
            found += [GpuRun(v, kind, str(said.get("release", "")), **facts) for v in said.get(kind, ())]
        if match is not None:
            found += [GpuRun(f"sm{number}", "ptx", match[2], **facts) for number in match[1].split()]
        capability = capability_of_device(facts["device"])
        built = re.search(r"\+cu(\d{2,3})(\d)$", str(row.get("torch", "")))
        if capability and built and facts["case"].startswith(_TESTS) and row.get("passed"):
            variant, release = f"sm{capability[0]}{capability[1]}", f"{built[1]}.{built[2]}"
            found.append(GpuRun(variant, "sass", release, **facts))
    return found


def capability_of_device(name: str) -> tuple[int, int] | None:
    """Compute capability of a GPU by its name, as far as ``ci/matrix.toml`` names it."""
    for capability, arch in load().archs.items():
        if any(re.search(rf"\b{gpu}\b", name) for gpu in arch.gpus):
            return capability
    return None


def verdict(cell: Cell, runs: Iterable[GpuRun]) -> tuple[str, list[GpuRun]]:
    """What of a cell ran on a GPU.

    Returns:
        ``own`` (this release's machine code for it), ``sass`` (another release's), ``ptx`` (its source, through PTX),
        ``compiled`` (nothing), ``cpu`` (it has no GPU code); and the runs that say so.
    """
    if cell.target is None or cell.cuda is None:
        return "cpu", []
    mine = [run for run in runs if run.variant == cell.target.variant]
    release = f"{cell.cuda[0]}.{cell.cuda[1]}"
    for level, chosen in (
        ("own", [r for r in mine if r.kind == "sass" and r.release == release]),
        ("sass", [r for r in mine if r.kind == "sass"]),
        ("ptx", [r for r in mine if r.kind == "ptx"]),
    ):
        if chosen:
            return level, chosen
    return "compiled", []
