"""The report in one line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ops.report_data import OpLine, TorchFacts


@dataclass(frozen=True)
class Verdict:
    """``state``: ``ready``, ``partly`` or ``broken``; ``text``: the line."""

    state: str
    text: str


def verdict(ops: Sequence[OpLine], torch: TorchFacts) -> Verdict:
    """What the whole report comes to."""
    works = [line.op for line in ops if line.compatible]
    broken = [line.op for line in ops if not line.compatible and (line.fails or not line.ways)]
    lonely = [line.op for line in ops if not line.compatible and line.op not in broken]
    if torch.version is None:
        return Verdict("broken", f"broken: torch is {_short(torch.problem)}, and the ops run on its tensors")
    if not works:
        return Verdict("broken", f"broken: none of {len(ops)} ops works here (ds_report --fix)")
    count = f"all {len(ops)} ops work" if len(works) == len(ops) else f"{len(works)} of {len(ops)} ops work"
    gpu = f"; {len(lonely)} need a GPU, and none is visible" if lonely else ""
    if torch.hip and lonely:
        gpu = f"; {len(lonely)} need an NVIDIA GPU, and this torch is built for ROCm"
    if broken:
        return Verdict("partly", f"partly: {count} here{gpu}; not {', '.join(broken)} (ds_report --fix)")
    return Verdict("ready", f"ready: {count} here{gpu}")


def _short(problem: str) -> str:
    return "not installed" if problem == "not installed" else f"broken ({problem})"
