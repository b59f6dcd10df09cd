"""Guards against a grid that claims a run nobody made, or forgets one."""

from __future__ import annotations

import json
from pathlib import Path

from farm_tool import gpu_runs

from op_builder.cells import cells, find_cell

H200 = {"op": "gpu_suite", "rc": 0, "device": "NVIDIA H200", "driver": "580.1", "commit": "abc", "date": "2026-11-30"}
TESTS = {**H200, "case": "tests", "passed": 10, "torch": "2.11.0+cu130"}
PTX = {**H200, "case": "source of sm_80 86 through its PTX (NVRTC 12.1): bits equal", "passed": 2, "torch": "x"}


def level(name: str, *rows: dict[str, object]) -> str:
    return gpu_runs.verdict(find_cell(name), gpu_runs.runs_of(rows))[0]


def test_what_ran_is_told_by_release_and_by_way() -> None:
    """Fault: sm_90 by CUDA 13.0 ran, and the cell of CUDA 12.1 is painted as if its own bytes had."""
    assert level("cu130-sm90", TESTS) == "own" and level("cu121-sm90", TESTS) == "sass"
    assert level("cu121-sm86", PTX) == "ptx" and level("cu124-sm80", PTX) == "ptx"
    assert level("cu121-sm89", TESTS, PTX) == "compiled" and level("cpu", TESTS) == "cpu"


def test_the_key_ran_says_it_too() -> None:
    """Fault: only a phrase counts, and the next record words it otherwise."""
    row = {**H200, "case": "parts of the farm", "ran": {"release": "12.1", "sass": ["sm90"], "ptx": ["sm75", "sm70"]}}
    assert level("cu121-sm90", row) == "own" and level("cu121-sm70", row) == "ptx"
    assert level("cu121-sm80", row) == "compiled"


def test_what_failed_or_had_no_gpu_proves_nothing() -> None:
    """Fault: a failed suite, or one on a CPU, counts as a run."""
    for broken in ({"rc": 1}, {"driver": None}, {"op": "fused_adam"}):
        assert level("cu130-sm90", {**TESTS, **broken}) == "compiled"
    assert level("cu130-sm90", {**TESTS, "device": "NVIDIA Unheard-of 9"}) == "compiled"
    assert level("cu130-sm90", {**TESTS, "passed": 0}) == "compiled"


def test_devices_are_told_by_whole_words() -> None:
    """Fault: an A100 counts as an A10, an L40 as an L4."""
    found = gpu_runs.capability_of_device
    assert found("NVIDIA A100-SXM4-80GB") == (8, 0) and found("NVIDIA A10") == (8, 6) and found("NVIDIA L4") == (8, 9)
    assert found("NVIDIA H200") == (9, 0) and found("NVIDIA L40S") is None


def test_the_recorded_runs_are_read(tmp_path: Path) -> None:
    """Fault: the reader no longer understands the records there are; or a broken file ends the report."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
    runs = gpu_runs.read(folder)
    assert any(r.kind == "sass" and r.variant == "sm90" for r in runs)
    assert {r.variant for r in runs if r.kind == "ptx"} >= {"sm70", "sm75", "sm80", "sm86", "sm89", "sm90"}
    (tmp_path / "broken.json").write_text("[{", encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}), encoding="utf-8")
    assert gpu_runs.read(tmp_path) == []
    assert {gpu_runs.verdict(c, runs)[0] for c in cells()} <= {"own", "sass", "ptx", "compiled", "cpu"}
