"""The farm's package, and a farm in a folder of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
if str(ROOT / "ci") not in sys.path:
    sys.path.insert(0, str(ROOT / "ci"))

from farm_tool.command import main


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty farm; no engine of this machine is asked."""
    empty = tmp_path / "no-programs"
    empty.mkdir()
    monkeypatch.setenv("DS_FARM_DIR", str(tmp_path / "farm"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return tmp_path / "farm"


@pytest.fixture
def ci_farm(farm: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``ci/farm`` in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def programs(folder: Path, **scripts: str) -> str:
    """A PATH whose programs answer from shell scripts, after which come the system's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.defpath}"


Runs = Callable[..., tuple[int, str, str]]
Words = Sequence[str]
