"""Guards against a farm that a kill leaves broken, and one that compiles what it has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from op_builder.manifest import read_manifest
from op_builder.matrix import load
from tests.unit.farm.conftest import ROOT

RELEASE, CELL = (12, 1), "cu121-sm86"


def farm_with_compilers(folder: Path, nvrtc_folders: Mapping[tuple[int, int], Path]) -> Path:
    """A farm that has the compiler of one release already: fetching is not what is tried here."""
    (folder / "compilers").mkdir(parents=True)
    (folder / "compilers" / load().cuda[RELEASE].nvrtc).symlink_to(nvrtc_folders[RELEASE], target_is_directory=True)
    return folder


def start(farm: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "ci" / "farm"), "--farm", str(farm), "build", *arguments]
    env = {**os.environ, "MAX_JOBS": "1"}
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        start_new_session=True,
    )  # fmt: skip


def finish(farm: Path, *arguments: str) -> str:
    process = start(farm, *arguments)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every part by its place; each is verified against its manifest."""
    found = {}
    for path in sorted(folder.glob("*/*/*.json")):
        manifest = read_manifest(path)
        manifest.verify(path.parent / manifest.filename)
        found[path.relative_to(folder).as_posix()] = manifest.sha256
    return found


def test_killed_at_any_moment_it_finishes_with_equal_digests(
    tmp_path: Path, nvrtc_folders: Mapping[tuple[int, int], Path]
) -> None:
    """Fault: half a part taken for a whole one, a lock nobody holds waited for, other bytes after a resumed build."""
    whole = farm_with_compilers(tmp_path / "whole", nvrtc_folders)
    finish(whole, CELL, "--no-host", "--out", str(tmp_path / "expected"))
    expected = digests(tmp_path / "expected")
    assert expected and expected == digests(whole / "store")
    killed = farm_with_compilers(tmp_path / "killed", nvrtc_folders)
    kills = 0
    for attempt in range(8):
        process = start(killed, CELL, "--no-host", "--out", str(tmp_path / "out"))
        held = len(digests(killed / "store"))
        if attempt % 2:  # right after a part appeared; otherwise somewhere in the middle of the next one
            deadline = time.monotonic() + 60
            while len(list((killed / "store").glob("*/*/*.json"))) <= held and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        else:
            time.sleep(0.25 + 0.2 * attempt)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
        assert set(digests(killed / "store").items()) <= set(expected.items())
        assert not (tmp_path / "out").exists() or digests(tmp_path / "out") == expected
    assert kills >= 3, "the build was over before it was killed"
    said = finish(killed, CELL, "--no-host", "--out", str(tmp_path / "out"))
    assert digests(tmp_path / "out") == expected == digests(killed / "store"), said
    again = finish(killed, CELL, "--no-host", "--out", str(tmp_path / "out"))
    assert f"{len(expected)} parts, 0 built, {len(expected)} from the store" in again


def test_one_more_architecture_compiles_that_one_only(
    tmp_path: Path, nvrtc_folders: Mapping[tuple[int, int], Path]
) -> None:
    """Fault: a new line of the matrix rebuilds the world."""
    farm = farm_with_compilers(tmp_path / "farm", nvrtc_folders)
    finish(farm, CELL, "--no-host", "--parts-only")
    said = finish(farm, CELL, "cu121-sm80", "--no-host", "--parts-only")
    lines = [line for line in said.splitlines() if "-gencode" in line]
    assert lines and all("code=sm_80" in line for line in lines), said


def test_a_damaged_part_is_built_again(tmp_path: Path, nvrtc_folders: Mapping[tuple[int, int], Path]) -> None:
    """Fault: a part cut short by a crash of the machine is a hit for ever."""
    farm = farm_with_compilers(tmp_path / "farm", nvrtc_folders)
    finish(farm, CELL, "--no-host", "--parts-only")
    before = digests(farm / "store")
    victim = next((farm / "store").glob("fused_adam/*/*.cubin"))
    victim.write_bytes(victim.read_bytes()[:100])
    said = finish(farm, CELL, "--no-host", "--out", str(tmp_path / "out"))
    assert ", 1 built," in said and digests(tmp_path / "out") == before


def test_a_manifest_that_cannot_be_read_is_built_again(
    tmp_path: Path, nvrtc_folders: Mapping[tuple[int, int], Path]
) -> None:
    """Fault: a manifest of a full disk, and the farm stops for good."""
    farm = farm_with_compilers(tmp_path / "farm", nvrtc_folders)
    finish(farm, CELL, "--no-host", "--parts-only")
    before = digests(farm / "store")
    next((farm / "store").glob("fused_lion/*/*.json")).write_text("not json", encoding="utf-8")
    finish(farm, CELL, "--no-host", "--out", str(tmp_path / "out"))
    assert digests(tmp_path / "out") == before
