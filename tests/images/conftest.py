"""The engines that ``make images`` works with: installed, started, stopped and removed here.

``DS_IMAGES_DIR`` names a folder to keep between runs (while developing); without it everything goes. Collected only
with ``DS_IMAGES=1``, which ``make images`` sets: these tests install Debian packages and need root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT / "ci") not in sys.path:
    sys.path.insert(0, str(ROOT / "ci"))

from farm_tool import images
from farm_tool.engines import Engine
from farm_tool.home import Farm, settings_of
from farm_tool.own_engine import OwnDocker, OwnPodman, install
from farm_tool.parts import Workplace

collect_ignore_glob = [] if os.environ.get("DS_IMAGES") == "1" else ["test_*.py"]
_LIMIT_S = 900


@dataclass(frozen=True)
class Images:
    """A farm with an engine: ``ci_farm`` runs its command line, ``engine`` asks the engine itself."""

    place: Workplace
    engine: Engine

    def ci_farm(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """The output of ``ci/farm``; a failed command fails the test with all it said."""
        code, said = self.attempt(*arguments, env=env)
        assert code == 0, said
        return said

    def attempt(self, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Exit code and output of ``ci/farm``."""
        command = [sys.executable, str(ROOT / "ci" / "farm"), "--farm", str(self.place.farm.root)]
        done = subprocess.run(
            [*command, "--engine", self.engine.name, *arguments], env=dict(env or self.engine.env), cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
            errors="replace", timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        print(done.stdout)
        return done.returncode, done.stdout


@pytest.fixture(scope="session")
def workplace() -> Iterator[Workplace]:
    """The farm of this run; its path is short, for the socket in it."""
    kept = os.environ.get("DS_IMAGES_DIR")
    root = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="ds-images-"))
    yield Workplace(Farm(root), settings_of(os.environ, None, None), say=print)
    if not kept:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def docker(workplace: Workplace) -> Iterator[Images]:
    """A dockerd of our own with the base image, stopped and removed afterwards."""
    daemon = OwnDocker(workplace.farm.engine)
    daemon.start(print)
    try:
        engine = Engine("docker", daemon.env)
        images.make_base(engine, workplace)
        yield Images(workplace, engine)
    finally:
        if os.environ.get("DS_IMAGES_DIR"):
            daemon.stop()
        else:
            daemon.remove()


@pytest.fixture(scope="session")
def podman(workplace: Workplace, docker: Images) -> Iterator[Images]:
    """podman with storage of its own, and the same base."""
    own = OwnPodman(workplace.farm.root / "podman")
    own.start()
    try:
        engine = Engine("podman", own.env)
        images.make_base(engine, workplace)
        yield Images(workplace, engine)
    finally:
        own.remove()


@pytest.fixture(scope="session")
def cpu(docker: Images) -> str:
    """``ds:cpu``, built by the command line."""
    docker.ci_farm("build", "cpu")
    return "ds:cpu"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes file systems of so many megabytes."""
    mounted: list[Path] = []

    def make(megabytes: int) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="ds-small-"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        folder.rmdir()


@pytest.fixture(scope="session")
def debian() -> Callable[[Mapping[str, str]], None]:
    """Installs Debian packages: command -> package."""
    return install


Words = Sequence[str]
