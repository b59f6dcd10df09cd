"""NVIDIA's run-time compiler of each CUDA release, from the Python package index, in the farm's own folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from op_builder.compile import fetch_nvrtc
from op_builder.cuda_toolkits import Nvrtc, find_nvrtc, nvrtc_folders
from op_builder.errors import CompilerMissing
from op_builder.locks import hold
from op_builder.matrix import dotted, load
from op_builder.settings import Settings

from .home import Farm


def fetched(releases: Iterable[tuple[int, int]], farm: Farm, settings: Settings, say: Callable[[str], None]) -> dict[
    tuple[int, int], Nvrtc
]:  # fmt: skip
    """The compiler of each release, fetched where the farm has none yet.

    Raises:
        CompilerMissing: it cannot be had, or what came is of another release.
    """
    return {release: _fetched(release, farm, settings, say) for release in sorted(set(releases))}


def _fetched(release: tuple[int, int], farm: Farm, settings: Settings, say: Callable[[str], None]) -> Nvrtc:
    requirement = load().release(release).nvrtc
    folder = farm.compilers / requirement
    if not (folder / "nvidia").is_dir():
        with hold(farm.compilers / ".locks", requirement, say):
            if not (folder / "nvidia").is_dir():
                say(f"fetching {requirement}")
                fetch_nvrtc(requirement, folder, settings)
    found = find_nvrtc(nvrtc_folders({}, (), [str(folder)], None, Path("/nonexistent")))
    if len(found) != 1 or found[0].version != release:
        seen = ", ".join(dotted(n.version) for n in found) or "none"
        raise CompilerMissing(
            f"{requirement} brought no NVRTC {dotted(release)}", f"found: {seen}", f"rm -r {folder}, and again"
        )
    return found[0]
