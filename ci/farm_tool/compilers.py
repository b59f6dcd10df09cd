"""From the Python package index, in the farm's own folder: NVRTC of each CUDA release, and the lowest TVM-FFI."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from op_builder.commands import Problem
from op_builder.compile import fetch_nvrtc
from op_builder.cuda_toolkits import Nvrtc, find_nvrtc, nvrtc_folders
from op_builder.errors import CompilerMissing
from op_builder.host import HostFacts
from op_builder.locks import hold
from op_builder.matrix import dotted, load
from op_builder.settings import Settings
from op_builder.toolchain import Toolchain
from op_builder.toolchain_ffi import find_ffi

from .home import Farm

Say = Callable[[str], None]


def fetched(
    releases: Iterable[tuple[int, int]], farm: Farm, settings: Settings, say: Say
) -> dict[tuple[int, int], Nvrtc]:
    """The compiler of each release, fetched where the farm has none yet.

    Raises:
        CompilerMissing: it cannot be had, or what came is of another release.
    """
    return {release: _nvrtc(release, farm, settings, say) for release in sorted(set(releases))}


def _nvrtc(release: tuple[int, int], farm: Farm, settings: Settings, say: Say) -> Nvrtc:
    requirement = load().release(release).nvrtc
    folder = _package(requirement, "nvidia", farm, settings, say)
    found = find_nvrtc(nvrtc_folders({}, (), [str(folder)], None, Path("/nonexistent")))
    if len(found) != 1 or found[0].version != release:
        seen = ", ".join(dotted(n.version) for n in found) or "none"
        raise CompilerMissing(
            f"{requirement} brought no NVRTC {dotted(release)}", f"found: {seen}", f"rm -r {folder}, and again"
        )
    return found[0]


def lowest_ffi(tools: Toolchain, host: HostFacts, farm: Farm, settings: Settings, say: Say) -> Toolchain:
    """The host tools, building against the lowest supported TVM-FFI, whichever is installed.

    Raises:
        CompilerMissing: it cannot be had.
    """
    tables = load()
    if tools.ffi is not None and tools.ffi.version == tables.ffi_minimum:
        return tools
    requirement = f"{tables.ffi_package}=={tables.ffi_minimum}"
    ffi = find_ffi(host, [str(_package(requirement, tables.ffi_module, farm, settings, say))])
    if isinstance(ffi, Problem):
        raise CompilerMissing(ffi.what, ffi.why, ffi.fix)
    return replace(tools, ffi=ffi, problems=tuple(p for p in tools.problems if tables.ffi_package not in p.what))


def _package(requirement: str, brings: str, farm: Farm, settings: Settings, say: Say) -> Path:
    folder = farm.compilers / requirement
    if not (folder / brings).is_dir():
        with hold(farm.compilers / ".locks", requirement, say):
            if not (folder / brings).is_dir():
                say(f"fetching {requirement}")
                fetch_nvrtc(requirement, folder, settings, brings)
    return folder
