"""NVRTC of several releases from the package index, each in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from op_builder.matrix import CudaRelease, dotted, load


def chosen() -> list[CudaRelease]:
    """The oldest release, the first with Blackwell, and the newest one with torch wheels."""
    rows = load().cuda
    picked = {min(rows), load().oldest_release((10, 0)).release, max(r for r, row in rows.items() if row.torch)}
    return [rows[r] for r in sorted(picked)]


@pytest.fixture(scope="session")
def nvrtc_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Folder of each NVRTC by release.

    ``DS_TEST_NVRTC`` names a folder that keeps them between runs (one subfolder per version, filled as needed);
    without it they are installed into the session's temporary folder.
    """
    kept = os.environ.get("DS_TEST_NVRTC", "")
    home = Path(kept) if kept else tmp_path_factory.mktemp("nvrtc")
    folders: dict[tuple[int, int], Path] = {}
    for row in chosen():
        folder = home / row.nvrtc.partition("==")[2]
        if not (folder / "nvidia").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
            asked = [*pip, "--disable-pip-version-check", "--target", str(folder), row.nvrtc]
            done = subprocess.run(
                asked, capture_output=True, encoding="utf-8", errors="replace", timeout=600, check=False
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                pytest.skip(f"{row.nvrtc} (CUDA {dotted(row.release)}) cannot be installed here: {last}")
        folders[row.release] = folder
    return folders
