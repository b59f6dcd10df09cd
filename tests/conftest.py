"""What every test stands on: the checkout on ``sys.path`` and a private store, so that no test sees another's parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
for entry in (ROOT, ROOT / "src"):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
IN_CI = os.environ.get("CI", "").lower() in ("true", "1")
# What `make test` installs itself on Linux: in CI a skip that names one of these hides a broken set-up, so it fails.
# `make conda` and `make images` run these, with what they set up first.
collect_ignore = [] if os.environ.get("DS_TEST_CONDA") else ["conda"]
INSTALLED_BY_MAKE = re.compile(
    r"g\+\+|C\+\+ compiler|readelf|check-jsonschema|'jsonschema'|scikit-learn|fio is not|uv is missing|no NVRTC \("
)


def refuse_skip(report: Report) -> Report:
    """In CI, turns a skip for a missing tool that the set-up should have brought into a failure."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    if IN_CI and sys.platform == "linux" and report.skipped and INSTALLED_BY_MAKE.search(said):
        report.outcome, report.longrepr = "failed", f"skipped in CI, where nothing may be missing: {said}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reads every test's outcome."""
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Reads every module's outcome: ``importorskip`` skips at collection."""
    return refuse_skip((yield))


class NvrtcFolders(Mapping[tuple[int, int], Path]):
    """Folder of each NVRTC of the matrix by release, installed from the package index when it is asked for.

    ``DS_TEST_NVRTC`` names a folder that keeps them between runs (one subfolder per version).
    """

    def __init__(self, home: Path) -> None:
        from op_builder.matrix import load

        self.home, self.rows = home, load().cuda

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, release: tuple[int, int]) -> Path:
        wanted = self.rows[release].nvrtc
        folder = self.home / wanted.partition("==")[2]
        if not (folder / "nvidia").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
            asked = [*pip, "--disable-pip-version-check", "--target", str(folder), wanted]
            done = subprocess.run(
                asked, capture_output=True, encoding="utf-8", errors="replace", timeout=600, check=False
            )
            if done.returncode:
                said = f"{wanted} cannot be installed here: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
                refuse = pytest.fail if IN_CI else pytest.skip
                refuse(said)
        return folder


@pytest.fixture(scope="session")
def nvrtc_folders(tmp_path_factory: pytest.TempPathFactory) -> NvrtcFolders:
    """NVRTC of every release of the matrix, a folder each."""
    kept = os.environ.get("DS_TEST_NVRTC", "")
    return NvrtcFolders(Path(kept) if kept else tmp_path_factory.mktemp("nvrtc"))
