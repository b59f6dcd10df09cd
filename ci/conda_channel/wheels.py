"""Stand-ins from wheels: a PyPI package repacked as the conda package of the same software."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler_build import assemble_package

from op_builder.errors import UsageError

# PyPI's name -> conda-forge's.
_CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}
PYTHON_TAG = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class Wheel:
    """A wheel file and what it says of itself."""

    path: Path
    name: str
    version: str
    requires: tuple[str, ...]
    pure: bool

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Read its METADATA."""
        with zipfile.ZipFile(path) as archive:
            (file,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            facts = email.message_from_bytes(archive.read(file))
        name = str(canonicalize_name(facts["Name"]))
        requires = tuple(facts.get_all("Requires-Dist") or ())
        return cls(path, name, facts["Version"], requires, path.name.endswith("-none-any.whl"))

    @property
    def conda_name(self) -> str:
        """What conda-forge calls it."""
        return _CONDA_NAMES.get(self.name, self.name)

    @property
    def conda_version(self) -> str:
        """Its version with a local label as conda writes it."""
        return self.version.replace("+", "_")

    def depends(self) -> Iterator[str]:
        """Its run dependencies, as conda writes them; what other platforms or extras need is left out."""
        for text in self.requires:
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                name = str(canonicalize_name(asked.name))
                yield f"{_CONDA_NAMES.get(name, name)} {asked.specifier}".strip()


def download(out: Path, *requirements: str, options: Sequence[str] = (), dependencies: bool = True) -> None:
    """Fetch wheels with pip; those already in ``out`` are not fetched again.

    Raises:
        UsageError: pip failed.
    """
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    argv += ["--find-links", str(out), "--dest", str(out), *options, *(() if dependencies else ("--no-deps",))]
    done = subprocess.run(
        [*argv, *requirements], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
        timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise UsageError(f"pip could not fetch {', '.join(requirements)}", done.stderr.strip()[-800:], "")


def unpack(wheel: Wheel, site: Path, scripts: Path) -> None:
    """A wheel's content as an installer would lay it out; what it keeps for headers and data goes beside."""
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(site)
    for data in site.glob("*.data"):
        for kind, target in (("purelib", site), ("platlib", site), ("scripts", scripts)):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, target, dirs_exist_ok=True)
        shutil.rmtree(data)
    for file in scripts.glob("*") if scripts.is_dir() else ():
        file.chmod(0o755)
    for info in site.glob("*.dist-info"):
        (info / "INSTALLER").write_text("conda\n", encoding="utf-8")


def assemble(wheel: Wheel, channel: Path, work: Path, subdir: str = "linux-64") -> None:
    """Add a wheel to a channel: a ``noarch: python`` package where it is pure, else one for this Python.

    Args:
        wheel: what to add.
        channel: root of the channel.
        work: a folder for unpacking.
        subdir: the platform of a wheel with machine code. For another platform than this one its files go to the
            site-packages of this Python's version, and nothing but files is asked of it (no Python is there).
    """
    shutil.rmtree(work, ignore_errors=True)
    native = subdir == "linux-64"
    site = work / ("site-packages" if wheel.pure else f"lib/{PYTHON_TAG}/site-packages")
    unpack(wheel, site, work / ("python-scripts" if wheel.pure else "bin"))
    python = "python >=3.10" if wheel.pure else f"python {sys.version_info[0]}.{sys.version_info[1]}.*"
    place = channel / ("noarch" if wheel.pure else subdir)
    place.mkdir(parents=True, exist_ok=True)
    assemble_package(
        name=wheel.conda_name,
        version=wheel.conda_version,
        target_platform="noarch" if wheel.pure else subdir,
        # A package cache goes by name and build string alone: two platforms' packages must not share one.
        build_string="standin_py_0" if wheel.pure else f"standin_{subdir.replace('-', '_')}_0",
        output_dir=place,
        files_dir=work,
        depends=[python, *wheel.depends()] if native or wheel.pure else [],
        noarch="python" if wheel.pure else None,
        compression_level=1,
        detect_prefix=False,
    )
