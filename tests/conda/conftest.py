"""`make conda` runs these, offline, on the channel that `ci/conda.py build` left in build/conda."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "ci")]

from conda_channel import solve
from conda_channel.place import BUILD_PLATFORM, Place

Run = Callable[..., str]


@pytest.fixture(scope="session")
def place() -> Place:
    """The channels."""
    found = Place()
    if not list(found.channel.rglob("*.conda")):
        pytest.fail("build/conda/channel holds no package; run: make conda")
    return found


@pytest.fixture(scope="session")
def prefix(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment after `conda install deepspeed` on a machine without a GPU."""
    target = tmp_path_factory.mktemp("conda") / "env"
    machine = solve.Machine("this one", BUILD_PLATFORM)
    solve.install(place, solve.solve(place, machine, ["deepspeed", "pip"]), target)
    return target


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a command of a prefix as `env -i` does: no variable but PATH, and in PATH nothing but the prefix."""

    def call(prefix: Path, *words: str | Path, check: bool = True, more: Mapping[str, str] | None = None) -> str:
        env = {"PATH": str(prefix / "bin"), "HOME": str(prefix / "home"), **(more or {})}
        done = subprocess.run(
            [str(prefix / "bin" / words[0]), *map(str, words[1:])], env=env, cwd=prefix, capture_output=True,
            encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words} gave {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    return call


@pytest.fixture(scope="session", autouse=True)
def offline() -> None:
    """Nothing here may reach a network: a proof that downloads something proves another thing."""
    table = Path("/proc/net/dev").read_text(encoding="utf-8")
    there = {line.split(":")[0].strip() for line in table.splitlines() if ":" in line} - {"lo"}
    if there:
        pytest.fail(f"network interfaces {there}; run: python ci/conda.py offline python -m pytest tests/conda")
