"""One table of all hosts, and what differs between them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("host", "Python", "torch", "GPUs", "driver", "ops", "wheel sha256", "verdict")
# What should be equal everywhere, beside the columns: two nodes may differ in it and both report "ready".
COMPARED = ("Python", "torch", "GPUs", "driver", "wheel sha256", "platform", "C library", "version", "CPU features")


@dataclass(frozen=True)
class Row:
    """One host: ``state`` is ``installed``, ``already there`` or ``failed``; ``why`` the reason of a failure."""

    host: str
    state: str
    why: str = ""
    report: Mapping[str, Any] | None = None
    sha256: str = ""

    @property
    def good(self) -> bool:
        """Whether the wheel is installed and reports."""
        return self.state != "failed"


def facts(row: Row) -> dict[str, str]:
    """What the table shows and compares, by name; "-" for what is not known."""
    found = row.report
    if found is None:
        return {name: "-" for name in (*COLUMNS, *COMPARED)} | {"host": row.host, "verdict": f"failed: {row.why}"}
    host = found["host"]
    gpus = Counter(gpu["name"] for gpu in host["gpus"])
    works = sum(op["compatible"] for op in found["ops"])
    driver = host["driver"]
    return {
        "host": row.host,
        "Python": found["python"].split()[0],
        "torch": found["torch"]["version"] or "none",
        "GPUs": ", ".join(f"{n} x {name}" for name, n in sorted(gpus.items())) or "none",
        "driver": driver["version"] if driver else "none",
        "ops": f"{works} of {len(found['ops'])}",
        "wheel sha256": row.sha256[:12] or "-",
        "verdict": f"{row.state}; {found['verdict']['text']}" if row.good else f"failed: {row.why}",
        "platform": host["platform"],
        "C library": host["libc"] or "none",
        "version": found["version"],
        "CPU features": " ".join(host["cpu_features"]) or "none",
    }


def differences(rows: Sequence[Row]) -> list[str]:
    """What is not equal on all hosts that answered, the odd ones named.

    Where most hosts agree, the others are pointed at; where no value has a majority, all are listed.
    """
    shown = [facts(row) for row in rows if row.report is not None]
    lines = []
    for name in COMPARED:
        by_value: dict[str, list[str]] = {}
        for found in shown:
            by_value.setdefault(found[name], []).append(found["host"])
        if len(by_value) < 2:
            continue
        most = max(by_value, key=lambda value: len(by_value[value]))
        if 2 * len(by_value[most]) > len(shown):
            odd = "; ".join(f"{', '.join(hosts)}: {value}" for value, hosts in by_value.items() if value != most)
            lines.append(f"{name} differs: {odd} (the others: {most})")
        else:
            lines.append(f"{name} differs: " + "; ".join(f"{', '.join(hosts)}: {v}" for v, hosts in by_value.items()))
    return lines


def odd_cells(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """(host, column) of every cell that differs from the majority of the hosts that answered."""
    shown = [facts(row) for row in rows if row.report is not None]
    out = set()
    for name in COLUMNS:
        if name not in COMPARED:
            continue
        counted = Counter(found[name] for found in shown)
        if len(counted) > 1:
            value, count = counted.most_common(1)[0]
            majority = 2 * count > len(shown)
            out |= {(found["host"], name) for found in shown if not majority or found[name] != value}
    return out


def lines(rows: Sequence[Row]) -> list[str]:
    """The table as aligned text; a ``*`` marks a cell that differs from the other hosts'."""
    odd = odd_cells(rows)
    cells = [list(COLUMNS)]
    for row in rows:
        found = facts(row)
        cells.append([found[name] + ("*" if (row.host, name) in odd else "") for name in COLUMNS])
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    aligned = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    return [aligned[0], "-" * min(120, len(aligned[0])), *aligned[1:]]
