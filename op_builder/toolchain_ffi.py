"""Where apache-tvm-ffi lies: headers and library for building, found without importing it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import faults, matrix
from .commands import Problem
from .host import HostFacts


@dataclass(frozen=True)
class FFI:
    """Headers and library of apache-tvm-ffi, found without importing it.

    Attributes:
        include: include folders, the package's own first.
        lib: folder of the library.
        library: the library to link to.
        version: of the distribution; ``""`` where it has no metadata.
    """

    include: tuple[Path, ...]
    lib: Path
    library: Path
    version: str


def find_ffi(host: HostFacts, paths: Sequence[str] | None = None) -> FFI | Problem:
    """Headers and library of apache-tvm-ffi on ``sys.path``, without importing it."""
    tables = matrix.load()
    fix = f'pip install "{tables.ffi_package}>={tables.ffi_minimum},<{tables.ffi_below}"'
    spec = importlib.machinery.PathFinder.find_spec(tables.ffi_module, list(paths) if paths is not None else None)
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if not places and host.libc == "musl":
        return faults.no_ffi_wheel_for_musl(tables.ffi_package, fix.partition("install ")[2])
    if not places:
        return Problem(f"{tables.ffi_package} is missing", f"no module {tables.ffi_module} on sys.path", fix)
    package = places[0]
    names = {"windows": ("tvm_ffi.lib", "tvm_ffi.dll"), "macos": ("libtvm_ffi.dylib",)}
    wanted = names.get(host.system, ("libtvm_ffi.so",))
    library = next((p for f in ("lib", ".") for n in wanted if (p := package / f / n).is_file()), None)
    include = [package / "include", package / "3rdparty/dlpack/include"]
    if library is None or not (include[0] / "tvm/ffi/c_api.h").is_file():
        lacking = " or ".join(wanted) if library is None else "tvm/ffi/c_api.h"
        return Problem(f"{tables.ffi_package} in {package} is not complete", f"it lacks {lacking}", fix)
    version = _ffi_version(tables.ffi_package, package)
    if version and not _in_range(version, tables.ffi_minimum, tables.ffi_below):
        wanted_range = f">={tables.ffi_minimum},<{tables.ffi_below}"
        return Problem(f"{tables.ffi_package} {version} does not fit", f"expected {wanted_range}", fix)
    return FFI(tuple(p for p in include if p.is_dir()), library.parent, library, version)


def _ffi_version(distribution: str, package: Path) -> str:
    for found in importlib.metadata.distributions(name=distribution, path=[str(package.parent)]):
        return found.version
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _in_range(version: str, low: str, below: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(low) <= Version(version) < Version(below)
    except InvalidVersion:
        return False
