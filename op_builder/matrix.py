"""``ci/matrix.toml`` as frozen tables: CUDA and torch releases, GPU architectures, Pythons, platforms.

The file is read once, on first use. Whatever it does not know is a :class:`MatrixError`: never a silent default.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import MatrixError

# By name, so that type checkers of either Python see one module; tomli is tomllib before it joined the library.
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

HOME = Path(__file__).resolve().parent.parent
PATH = HOME / "ci" / "matrix.toml"

Version = tuple[int, ...]
Capability = tuple[int, int]


def parse_version(text: str) -> Version:
    """``"12.4.127"`` as ``(12, 4, 127)``; anything but dotted decimals is a :class:`MatrixError`."""
    parts = text.strip().split(".")
    if not all(p.isascii() and p.isdigit() for p in parts):
        raise MatrixError(f"{text!r} is not a version", "expected dotted decimals", "write for example 12.4")
    return tuple(int(p) for p in parts)


def _pair(text: str) -> tuple[int, int]:
    version = parse_version(text)
    if len(version) != 2:
        raise MatrixError(f"{text!r} is not a release", "expected MAJOR.MINOR", "write for example 12.4")
    return version[0], version[1]


def dotted(version: Iterable[int]) -> str:
    """``(12, 4)`` as ``"12.4"``."""
    return ".".join(str(part) for part in version)


@dataclass(frozen=True)
class Range:
    """Versions from ``low`` on and below ``below`` (None = open). ``Range((9,), None).holds((12, 2))``."""

    low: Version
    below: Version | None

    def holds(self, version: Version) -> bool:
        """Whether ``version`` lies in the range."""
        return version >= self.low and (self.below is None or version < self.below)

    def __str__(self) -> str:
        return f">={dotted(self.low)}" + (f",<{dotted(self.below)}" if self.below else "")


@dataclass(frozen=True)
class Arch:
    """One GPU architecture; the comment above ``[arch]`` in the file explains the fields."""

    capability: Capability
    name: str
    gpus: tuple[str, ...]
    listed: bool
    first: Version
    last: Version | None
    a: Version | None
    f: Version | None
    family: str
    tegra: bool
    driver: Version | None
    cell: bool
    ship: bool
    now: Capability | None

    def known_to(self, release: Version, suffix: str = "") -> bool:
        """Whether the compiler of ``release`` targets it in the form ``suffix`` (``""``, ``"a"`` or ``"f"``)."""
        pair = release[:2]
        if pair < self.first or (self.last is not None and pair > self.last):
            return False
        since = {"": self.first, "a": self.a, "f": self.f}.get(suffix)
        return since is not None and pair >= since


@dataclass(frozen=True)
class CudaRelease:
    """One CUDA release we compile with."""

    release: tuple[int, int]
    ptx_isa: tuple[int, int]
    driver: Version
    nvrtc: str
    torch: tuple[str, ...]
    gcc: Range
    clang: Range
    msvc: Range


@dataclass(frozen=True)
class Platform:
    """What a host library is built for."""

    name: str
    library: str
    glibc: tuple[int, int] | None
    gpu: bool
    wheel: str
    conda: str


@dataclass(frozen=True)
class Image:
    """What images stand on, and how large they may become (megabytes by kind: ``ours``, ``cpu``, ``cuda``)."""

    base: str
    python: str
    most_mb: Mapping[str, int]


@dataclass(frozen=True)
class Matrix:
    """The whole file. Mappings are read-only and in numeric order.

    ``torch_cpu`` is the release of the image without CUDA, ``torch_patch`` the last patch of each release,
    ``torch_pip`` the CUDA release of the wheel that plain pip takes.
    """

    pythons: tuple[str, ...]
    torch_minimum: str
    torch_cpu: str
    torch_pythons: Mapping[str, tuple[str, ...]]
    torch_patch: Mapping[str, str]
    torch_pip: Mapping[str, tuple[int, int]]
    image: Image
    ffi_package: str
    ffi_module: str
    ffi_minimum: str
    ffi_below: str
    host_compilers: Mapping[str, Range]
    drivers: Mapping[int, Version]
    ptx: Mapping[tuple[int, int], tuple[int, int]]
    cuda: Mapping[tuple[int, int], CudaRelease]
    archs: Mapping[Capability, Arch]
    ship_ptx: tuple[Capability, ...]
    platforms: Mapping[str, Platform]

    def arch(self, capability: Capability) -> Arch:
        """The architecture of one compute capability.

        Raises:
            MatrixError: the file has no such line.
        """
        found = self.archs.get(capability)
        if found is None:
            raise MatrixError(
                f"compute capability {dotted(capability)} is not in ci/matrix.toml",
                f"known: {', '.join(dotted(c) for c in self.archs)}",
                f'add a line "{dotted(capability)}" under [arch] of ci/matrix.toml',
            )
        return found

    def release(self, release: Version) -> CudaRelease:
        """The row of a CUDA release, ``(12, 4)`` or longer.

        Raises:
            MatrixError: the file has no such release.
        """
        found = self.cuda.get((release[0], release[1])) if len(release) >= 2 else None
        if found is None:
            raise MatrixError(
                f"CUDA {dotted(release)} is not in ci/matrix.toml",
                f"known: {', '.join(dotted(r) for r in self.cuda)}",
                f'use one of these, or add [cuda."{dotted(release[:2])}"] to ci/matrix.toml',
            )
        return found

    def is_tegra(self, capability: Capability) -> bool:
        """Whether the capability is known to belong to a system-on-chip; unknown ones are taken as desktop parts."""
        found = self.archs.get(capability)
        return found is not None and found.tegra

    def family(self, capability: Capability) -> str:
        """Name of the family the capability belongs to; ``""`` for architectures without family forms."""
        found = self.archs.get(capability)
        return found.family if found is not None else ""

    def ptx_isa(self, release: Version) -> tuple[int, int]:
        """PTX version the compiler of ``release`` writes, and the newest a driver of that CUDA version reads.

        A release the file does not list counts as the newest listed one not above it, which is the safe side for a
        driver; a release older than all is a :class:`MatrixError`.
        """
        below = [r for r in self.ptx if r <= tuple(release[:2])]
        if not below:
            raise MatrixError(
                f"no PTX version is known for CUDA {dotted(release)}",
                f"the oldest of [ptx] is {dotted(next(iter(self.ptx)))}",
                f'add "{dotted(release[:2])}" to [ptx] of ci/matrix.toml',
            )
        return self.ptx[below[-1]]

    def driver_floor(self, release: Version, capability: Capability | None = None) -> Version:
        """Lowest driver branch that loads machine code of this compiler release for this architecture.

        A CUDA major the file does not list is taken to need more than every listed one: the newest floor plus one.
        """
        floor = self.drivers.get(release[0])
        if floor is None:
            newest = max(self.drivers)
            lowest, highest = self.drivers[min(self.drivers)], self.drivers[newest]
            floor = (highest[0] + 1,) if release[0] > newest else lowest
        arch = self.archs.get(capability) if capability is not None else None
        extra = arch.driver if arch is not None else None
        return max(floor, extra) if extra is not None else floor

    def oldest_release(self, capability: Capability, suffix: str = "") -> CudaRelease:
        """The oldest release of ``[cuda]`` that targets ``capability`` in the form ``suffix``."""
        arch = self.arch(capability)
        for row in self.cuda.values():
            if arch.known_to(row.release, suffix):
                return row
        raise MatrixError(
            f"no CUDA release of ci/matrix.toml targets {dotted(capability)}{suffix}",
            f"releases: {', '.join(dotted(r) for r in self.cuda)}; its first is {dotted(arch.first)}, its last "
            f"{dotted(arch.last) if arch.last else 'the newest'}",
            "choose an architecture that one of these releases has",
        )

    def targets_of(self, release: Version) -> tuple[Capability, ...]:
        """Capabilities the compiler of ``release`` targets, in numeric order."""
        return tuple(c for c, a in self.archs.items() if a.known_to(release))

    def platform(self, name: str) -> Platform:
        """One platform by name (``linux-x86_64``); an unknown one is a :class:`MatrixError`."""
        found = self.platforms.get(name)
        if found is None:
            known = ", ".join(self.platforms)
            raise MatrixError(f"platform {name!r} is not in ci/matrix.toml", f"known: {known}", f"use one of {known}")
        return found


_ARCH_KEYS = {"name", "gpus", "listed", "first", "last", "a", "f", "family", "tegra", "driver", "cell", "ship", "now"}


def _arch(key: str, row: Mapping[str, Any]) -> Arch:
    unknown = sorted(set(row) - _ARCH_KEYS)
    if unknown:
        raise MatrixError(f"[arch] {key!r} has unknown keys {unknown}", f"known: {sorted(_ARCH_KEYS)}", "remove them")

    def version(name: str) -> Version | None:
        return parse_version(row[name]) if row.get(name) else None

    if row.get("f") and not row.get("family"):
        raise MatrixError(f"[arch] {key!r} has an `f` form and no family", "the two go together", "add `family`")
    return Arch(
        capability=_pair(key),
        name=row["name"],
        gpus=tuple(row.get("gpus", ())),
        listed=bool(row.get("listed", False)),
        first=parse_version(row["first"]),
        last=version("last"),
        a=version("a"),
        f=version("f"),
        family=row.get("family", ""),
        tegra=bool(row.get("tegra", False)),
        driver=version("driver"),
        cell=bool(row.get("cell", False)),
        ship=bool(row.get("ship", False)),
        now=_pair(row["now"]) if row.get("now") else None,
    )


def _range(pair: list[str]) -> Range:
    low, below = pair
    return Range(parse_version(low), parse_version(below) if below else None)


def _cuda(key: str, row: Mapping[str, Any], ptx: Mapping[Capability, Capability], drivers: Any) -> CudaRelease:
    release = _pair(key)
    return CudaRelease(
        release=release,
        ptx_isa=ptx[release],
        driver=drivers[release[0]],
        nvrtc=row["nvrtc"],
        torch=tuple(row["torch"]),
        gcc=_range(row["gcc"]),
        clang=_range(row["clang"]),
        msvc=_range(row["msvc"]),
    )


def _platform(name: str, row: Mapping[str, Any]) -> Platform:
    glibc = _pair(row["glibc"]) if row.get("glibc") else None
    return Platform(name, row["library"], glibc, bool(row["gpu"]), row["wheel"], row["conda"])


def _image(row: Mapping[str, Any]) -> Image:
    return Image(row["base"], row["python"], MappingProxyType(dict(row["most_mb"])))


def parse(text: str, where: str = "ci/matrix.toml") -> Matrix:
    """The tables of a matrix file's text.

    Raises:
        MatrixError: the text is no TOML, lacks a key, or contradicts itself.
    """
    try:
        data = tomllib.loads(text)
        ptx = {_pair(k): _pair(v) for k, v in data["ptx"].items()}
        drivers = {int(k): parse_version(v) for k, v in data["driver"].items()}
        archs = {a.capability: a for a in (_arch(k, v) for k, v in data["arch"].items())}
        cuda = {r.release: r for r in (_cuda(k, v, ptx, drivers) for k, v in data["cuda"].items())}
        torch, ffi = data["torch"], data["ffi"]
        return _consistent(
            Matrix(
                pythons=tuple(data["python"]["versions"]),
                torch_minimum=torch["minimum"],
                torch_cpu=torch["cpu"],
                torch_pythons=MappingProxyType({k: tuple(v) for k, v in torch["python"].items()}),
                torch_patch=MappingProxyType(dict(torch["patch"])),
                torch_pip=MappingProxyType({k: _pair(v) for k, v in torch["pip"].items()}),
                image=_image(data["image"]),
                ffi_package=ffi["package"],
                ffi_module=ffi["module"],
                ffi_minimum=ffi["minimum"],
                ffi_below=ffi["below"],
                host_compilers=MappingProxyType({k: _range(v) for k, v in data["host_compiler"].items()}),
                drivers=MappingProxyType(dict(sorted(drivers.items()))),
                ptx=MappingProxyType(dict(sorted(ptx.items()))),
                cuda=MappingProxyType(dict(sorted(cuda.items()))),
                archs=MappingProxyType(dict(sorted(archs.items()))),
                ship_ptx=tuple(_pair(c) for c in data["ship"]["ptx"]),
                platforms=MappingProxyType({k: _platform(k, v) for k, v in data["platform"].items()}),
            )
        )
    except tomllib.TOMLDecodeError as exc:
        raise MatrixError(f"{where} is not TOML", str(exc), f"correct {where}") from exc
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        if isinstance(exc, MatrixError):
            raise
        raise MatrixError(f"{where} is not complete", f"{type(exc).__name__}: {exc}", f"correct {where}") from exc


def _consistent(matrix: Matrix) -> Matrix:
    for torch, pythons in matrix.torch_pythons.items():
        if torch not in matrix.torch_patch or torch not in matrix.torch_pip or matrix.image.python not in pythons:
            why = f"[torch.patch], [torch.pip] or the wheels for the images' Python {matrix.image.python} lack it"
            raise MatrixError(f"[torch.python] names torch {torch}", why, "add it there")
    for row in matrix.cuda.values():
        for torch in row.torch:
            if torch not in matrix.torch_pythons:
                raise MatrixError(
                    f'[cuda."{dotted(row.release)}"] names torch {torch}', "[torch.python] lacks it", "add it there"
                )
    for arch in matrix.archs.values():
        if arch.now is not None and arch.now not in matrix.archs:
            raise MatrixError(f"[arch] {dotted(arch.capability)} is now {dotted(arch.now)}", "no such line", "add it")
        if arch.ship:
            matrix.oldest_release(arch.capability)
    for capability in matrix.ship_ptx:
        matrix.oldest_release(capability)
    return matrix


@functools.cache
def load(path: Path = PATH) -> Matrix:
    """The matrix of this checkout or installation, read once per process.

    Raises:
        MatrixError: the file is missing, no TOML, or contradicts itself.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise MatrixError(f"cannot read {path}", str(exc), "install the package again; it ships this file") from exc
    return parse(text, str(path))
