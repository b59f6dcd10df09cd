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

from op_builder.compile import fetch_nvrtc
from op_builder.matrix import load
from op_builder.settings import Settings


@pytest.fixture(scope="session")
def lowest_ffi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TVM-FFI that host parts are built against, fetched once."""
    kept = os.environ.get("DS_TEST_NVRTC", "")
    requirement = f"{load().ffi_package}=={load().ffi_minimum}"
    folder = (Path(kept) if kept else tmp_path_factory.mktemp("ffi")) / requirement
    if not (folder / load().ffi_module).is_dir():
        fetch_nvrtc(requirement, folder, Settings.read(), load().ffi_module)
    return folder


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowest_ffi: Path) -> Path:
    """A farm that has nothing but the TVM-FFI; no daemon of this machine is asked."""
    (tmp_path / "farm" / "compilers").mkdir(parents=True)
    (tmp_path / "farm" / "compilers" / lowest_ffi.name).symlink_to(lowest_ffi, target_is_directory=True)
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
