"""The farm's report: one HTML file that needs nothing else, the matrix as a grid of cells to click on."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from op_builder.cells import Cell, cells
from op_builder.matrix import dotted, load

from . import gpu_runs, records, status
from .parts import Workplace

LEVELS: Mapping[str, str] = {
    "own": "machine code of this very cell ran on a GPU",
    "sass": "machine code of this architecture ran on a GPU, made by another CUDA release",
    "ptx": "its source ran on a GPU through its PTX; its machine code was compiled only",
    "compiled": "compiled only, never run on a GPU",
    "cpu": "no GPU code",
}
TEMPLATE = Path(__file__).with_name("page.html")


def gather(place: Workplace, results: Path) -> dict[str, Any]:
    """Everything the page shows, JSON-serialisable."""
    planned = status.plan(place, cells())
    runs = gpu_runs.read(results)
    shown = [of_cell(cell, place, planned, runs) for cell in cells()]
    sets = {}
    for name in records.SETS:
        record = records.read(place.farm, name)
        if record is not None:
            kept = ("seconds", "hits", "built", "bytes", "date", "commit")
            sets[name] = {**{k: record[k] for k in kept}, "parts": len(record["parts"])}
    return {"commit": records.commit(), "levels": dict(LEVELS), "cells": shown, "sets": sets}


def of_cell(cell: Cell, place: Workplace, planned: status.Planned, runs: Sequence[gpu_runs.GpuRun]) -> dict[str, Any]:
    """One cell: what it is, what it holds, what it cost, what ran."""
    row = status.status_of(cell, place, planned)
    record = records.read(place.farm, cell.name) or {}
    level, proof = gpu_runs.verdict(cell, runs)
    return {
        **{k: row[k] for k in ("cell", "tags", "cuda", "torch", "arch", "compiler", "conda_build", "digest", "status")},
        "level": level,
        "proof": [f"{r.case} ({r.device}, CUDA {r.release}, commit {r.commit}, {r.date})" for r in proof],
        "parts": record.get("parts", []),
        "planned": len(row["parts"]),
        "in_store": row["in_store"],
        "layers": record.get("layers", {}),
        "image": record.get("image", ""),
        "image_bytes": record.get("image_bytes"),
        "image_seconds": record.get("image_seconds"),
        "engine": record.get("engine", ""),
        "built": f"{record['date']}, commit {record['commit']}" if record else "",
    }


def page(data: Mapping[str, Any]) -> str:
    """The whole file."""
    tables = load()
    archs = [c for c, a in tables.archs.items() if a.cell]
    head = "".join(
        f'<th scope="col">sm_{a}{b}<small>{html.escape(tables.arch((a, b)).name)}</small></th>' for a, b in archs
    )
    body = []
    by_place = {(c["cuda"], c["torch"], c["arch"]): c for c in data["cells"]}
    for cuda, row in tables.cuda.items():
        for torch in [*row.torch, None]:
            line = [by_place.get((dotted(cuda), torch, f"sm_{a}{b}")) for a, b in archs]
            if any(line):
                name = f"CUDA {dotted(cuda)}" + (f", torch {torch}" if torch else ", parts only")
                body.append(f'<tr><th scope="row">{name}</th>{"".join(map(_square, line))}</tr>')
    cpu = by_place[None, tables.torch_cpu, None]
    body.insert(0, f'<tr><th scope="row">no CUDA, torch {cpu["torch"]}</th>{_square(cpu, len(archs))}</tr>')
    keys = "".join(f'<li><span class="{k}"></span>{html.escape(v)}</li>' for k, v in LEVELS.items())
    # "</" must not end the script element; the JSON stays the same.
    text = json.dumps(data, ensure_ascii=True).replace("</", "<\\/")
    sums = "; ".join(
        f"{n.replace('-', ' ')}: {s['parts']} parts, {s['bytes'] / 1e6:.1f} MB, {s['built']} compiled and "
        f"{s['hits']} from the store in {s['seconds']:.1f} s"
        for n, s in data["sets"].items()
    )
    made = TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (("HEAD", head), ("BODY", "\n".join(body)), ("KEYS", keys), ("SUMS", sums), ("DATA", text)):
        made = made.replace(f"<!--{mark}-->", value)
    return made


def _square(cell: Mapping[str, Any] | None, width: int = 1) -> str:
    """One square of the grid."""
    span = f' colspan="{width}"' if width > 1 else ""
    if cell is None:
        return f'<td class="none"{span} title="this compiler or this torch does not have it">-</td>'
    mark = ("image" if cell["image"] else "parts") if cell["status"] == "built" else cell["status"]
    name = html.escape(cell["cell"])
    title = html.escape(f"{cell['cell']}: {mark}; {LEVELS[cell['level']]}")
    said = f'class="{cell["level"]}" data-cell="{name}" title="{title}"'
    return f"<td{span}><button {said}>{html.escape(mark)}</button></td>"
