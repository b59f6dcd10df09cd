"""System packages per feature: the tools of the builder, the needs of every op's spec, under this machine's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepspeed_ops.op_builder.packages import FEATURES, names_for
from deepspeed_ops.op_builder.spec import all_specs
from deepspeed_ops.report_data import FeatureLine, OpLine

if TYPE_CHECKING:
    from deepspeed_ops.ops_report import Seen


def feature_lines(seen: Seen) -> tuple[FeatureLine, ...]:
    """One line per feature and need; pure but for the registry of specs."""
    return (*_tools(seen), *_ops(seen))


def _tools(seen: Seen) -> Iterator[FeatureLine]:
    tools = seen.toolchain
    found: dict[str, bool] = {}
    if tools is not None:
        found = {
            "c++": tools.host is not None,
            "ninja": tools.ninja is not None,
            "nvrtc": bool(tools.nvrtc or tools.nvcc),
        }
    for feature, (needs, what_for) in FEATURES.items():
        for need in needs:
            state = {True: "found", False: "missing", None: ""}[found.get(need)]
            yield FeatureLine(feature, need, names_for(need, seen.distribution), state, what_for)


def _ops(seen: Seen) -> Iterator[FeatureLine]:
    lines = {line.op: line for line in seen.ops}
    for spec in all_specs().values():
        for need in spec.needs:
            line = lines.get(spec.name)
            state = _state(line, need) if line is not None else ""
            yield FeatureLine(spec.name, need, names_for(need, seen.distribution), state, spec.summary)


def _state(line: OpLine, need: str) -> str:
    """Whether a need was found, by what the op's line says of it."""
    own = [way for way in line.ways if way.what == need]
    if own:  # an optional library has a way of its own
        return "found" if own[0].action == "load" else "missing"
    # The resolver names a need that is missing; where it judged and named none, it was found.
    missing = any(f": needs: {need}: " in reason for way in line.ways for reason in way.why_not)
    return "missing" if missing else "found" if line.ways else ""
