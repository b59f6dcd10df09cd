"""Which device compiler makes a target: the newest here that knows it and whose output the driver loads."""

from __future__ import annotations

from .errors import CompilerMissing
from .matrix import dotted, load
from .targets import Target, supported_by
from .toolchain import HostCompiler, Nvcc, Nvrtc, Toolchain

DeviceCompiler = Nvcc | Nvrtc


def device_compilers(toolchain: Toolchain) -> tuple[DeviceCompiler, ...]:
    """Every device compiler, newest release first; NVRTC before nvcc, which is slower and needs a host compiler."""
    found: list[DeviceCompiler] = [*toolchain.nvrtc, *toolchain.nvcc]
    return tuple(sorted(found, key=lambda c: (c.version, isinstance(c, Nvrtc)), reverse=True))


def choose_device_compiler(
    target: Target,
    toolchain: Toolchain,
    *,
    release: tuple[int, int] | None = None,
    driver_cuda: tuple[int, int] | None = None,
) -> DeviceCompiler:
    """The compiler for a target.

    Args:
        target: what to make.
        toolchain: what is here.
        release: only this CUDA release will do; default: the newest that knows the target.
        driver_cuda: CUDA version of the driver that has to load the part: machine code of a newer major will not.

    Raises:
        CompilerMissing: none fits; says which were looked at, what they know, and what to install.
    """
    looked = []
    for compiler in device_compilers(toolchain):
        pair = compiler.version[:2]
        if release is not None and pair != release:
            looked.append(f"{compiler_name(compiler)} is not release {dotted(release)}")
        elif driver_cuda is not None and pair[0] > driver_cuda[0]:
            looked.append(f"{compiler_name(compiler)} makes code that the driver (CUDA {dotted(driver_cuda)}) refuses")
        elif not compiler.targets(target):
            known = ", ".join(t.code for t in compiler.archs)
            looked.append(f"{compiler_name(compiler)} knows {known}")
        else:
            return compiler
    why = "; ".join(looked) or "no nvcc and no NVRTC was found"
    raise CompilerMissing(f"no compiler here makes {target.code}", why, _cure(target, release, driver_cuda))


def _cure(target: Target, release: tuple[int, int] | None, driver_cuda: tuple[int, int] | None) -> str:
    rows = [
        row
        for pair, row in load().cuda.items()
        if (release is None or pair == release)
        and (driver_cuda is None or pair[0] <= driver_cuda[0])
        and supported_by(target, pair)
    ]
    if not rows:
        return "update this package: its table of CUDA releases has none that fits"
    # The oldest that fits asks least of the driver.
    return f"pip install {rows[0].nvrtc}"


def compiler_name(compiler: HostCompiler | DeviceCompiler) -> str:
    """``g++ 12.2.0`` or ``nvrtc 13.0``, as logs and manifests have it."""
    if isinstance(compiler, HostCompiler):
        names = {"gcc": "g++", "clang": "clang++", "msvc": "cl", "mingw": "mingw g++"}
        kind = names.get(compiler.kind, compiler.kind)
        return f"{kind} {dotted(compiler.version)}"
    return f"{'nvrtc' if isinstance(compiler, Nvrtc) else 'nvcc'} {dotted(compiler.version[:2])}"
