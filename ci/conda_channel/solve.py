"""Which builds a machine gets: the solver asked for machines we do not have, through chosen virtual packages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rattler
from rattler.exceptions import SolverError

from conda_channel import standins
from conda_channel.build import render
from conda_channel.place import BUILD_PLATFORM, CROSS_PLATFORM, Place, index
from op_builder import matrix
from op_builder.errors import UsageError

OURS = "deepspeed"


@dataclass(frozen=True)
class Machine:
    """A machine as a solver sees it.

    Attributes:
        label: for tables.
        platform: conda's name of it.
        cuda: newest CUDA that its driver runs; ``""`` without one.
        glibc: of its system; ``""``: this one's.
    """

    label: str
    platform: str
    cuda: str = ""
    glibc: str = ""

    def virtual_packages(self) -> list[rattler.GenericVirtualPackage]:
        """What the solver is told."""
        overrides = rattler.VirtualPackageOverrides.from_env()
        overrides.cuda = rattler.Override.string(self.cuda)
        if self.glibc:
            overrides.libc = rattler.Override.string(self.glibc)
        found = [v.into_generic() for v in rattler.VirtualPackage.detect(overrides)]
        if self.platform.startswith("linux"):
            return found
        kept = [v for v in found if v.name.normalized in ("__cuda", "__archspec")]
        own = {"win-64": ["__win"], "osx-arm64": ["__unix", "__osx"]}[self.platform]
        version = rattler.Version("11.0" if self.platform.startswith("osx") else "0")
        return [
            *kept,
            *(rattler.GenericVirtualPackage(rattler.PackageName(n), version, rattler.BuildString("0")) for n in own),
        ]


# The rows of the table; what each must get is tests/conda/test_solver.py's.
MACHINES = (
    Machine("Linux, no GPU", "linux-64"),
    Machine("Linux, driver of CUDA 11.8", "linux-64", "11.8"),
    Machine("Linux, driver of CUDA 12.4", "linux-64", "12.4"),
    Machine("Linux, driver of CUDA 13.0", "linux-64", "13.0"),
    Machine("Linux, driver of CUDA 13.2", "linux-64", "13.2"),
    Machine("Linux, glibc 2.17", "linux-64", "12.4", "2.17"),
    Machine("Linux on ARM, no GPU", "linux-aarch64"),
    Machine("Linux on ARM, driver of CUDA 13.0", "linux-aarch64", "13.0"),
    Machine("Windows, no GPU", "win-64"),
    Machine("Windows, driver of CUDA 12.8", "win-64", "12.8"),
    Machine("macOS on ARM", "osx-arm64"),
)


@dataclass(frozen=True)
class Solution:
    """What a machine gets, or why nothing."""

    records: tuple[rattler.RepoDataRecord, ...] = ()
    error: str = ""

    @property
    def ours(self) -> dict[str, str]:
        """Build strings of our own packages, by name."""
        return {r.name.normalized: str(r.build) for r in self.records if r.name.normalized.startswith(OURS)}

    @property
    def names(self) -> set[str]:
        """Names of all packages."""
        return {r.name.normalized for r in self.records}

    @property
    def our_bytes(self) -> int:
        """What of ours is downloaded."""
        return sum(r.size or 0 for r in self.records if r.name.normalized.startswith(OURS))


def solve(place: Place, machine: Machine, specs: Sequence[str] = (OURS,), channels: Sequence[Path] = ()) -> Solution:
    """Ask the solver that pixi and rattler use, with strict channel priority.

    Args:
        place: our channel and the stand-ins.
        machine: whose virtual packages count.
        specs: what the user asks for.
        channels: searched before those of ``place``.
    """
    sources = [rattler.Channel(c.as_uri()) for c in channels] + [rattler.Channel(c) for c in place.channels]
    task = rattler.solve(
        sources=sources,
        specs=list(specs),
        platforms=[machine.platform, "noarch"],
        virtual_packages=machine.virtual_packages(),
        gateway=rattler.Gateway(cache_dir=place.root / "gateway"),
    )
    try:
        return Solution(tuple(asyncio.run(_wait(task))))
    except SolverError as exc:
        return Solution(error=str(exc))


async def _wait(task):  # type: ignore[no-untyped-def]
    return await task


def add_rendered(place: Place) -> None:
    """Records of the host packages that cannot be built here, with the requirements that the recipe renders for them.

    They hold no files: good for asking the solver, and nothing else.
    """
    for row in matrix.load().platforms.values():
        if row.conda in (BUILD_PLATFORM, CROSS_PLATFORM):
            continue
        (made,) = render(row.conda)
        recipe = made.recipe
        standins.empty(
            place.channel, row.conda, recipe.package.name, recipe.package.version, recipe.requirements.to_dict()["run"],
            build=str(recipe.build.string),
        )  # fmt: skip
    index(place.channel)


def install(place: Place, solution: Solution, prefix: Path, platform: str = BUILD_PLATFORM) -> None:
    """Install a solution into a new prefix.

    Raises:
        UsageError: there is none.
    """
    if solution.error:
        raise UsageError("nothing to install", solution.error, "")
    subdir = rattler.Subdir(platform) if callable(getattr(rattler, "Subdir", None)) else platform
    task = rattler.install(
        list(solution.records),
        target_prefix=prefix,
        cache_dir=place.root / "cache",
        platform=subdir,
        show_progress=False,
    )
    asyncio.run(_wait(task))


def add(place: Place, solution: Solution, prefix: Path) -> None:
    """Install a solution into a prefix that has packages already: those that are not in it are removed."""
    _change(place, list(solution.records), prefix)


def uninstall(place: Place, prefix: Path) -> None:
    """Remove every package of a prefix."""
    _change(place, [], prefix)


def _change(place: Place, records: list[rattler.RepoDataRecord], prefix: Path) -> None:
    installed = [rattler.PrefixRecord.from_path(p) for p in sorted((prefix / "conda-meta").glob("*.json"))]
    options = {"cache_dir": place.root / "cache", "installed_packages": installed, "show_progress": False}
    asyncio.run(_wait(rattler.install(records, target_prefix=prefix, **options)))
