"""How parts become conda packages: names and variants, pure functions of the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .matrix import Matrix, dotted, load
from .targets import ship_set


@dataclass(frozen=True)
class OnPlatform:
    """A variant's value that counts on some platforms only; ``selector`` as recipes write it (``linux``, ``win``)."""

    selector: str
    value: str


def ship_releases(known: Matrix | None = None) -> tuple[tuple[int, int], ...]:
    """The CUDA releases that make the ship set's GPU parts, oldest first: one conda package each."""
    return tuple(sorted({release for _, release in ship_set(known)}))


def cubin_package(release: tuple[int, int]) -> str:
    """Name of the package that holds the GPU parts made by one CUDA release.

    >>> cubin_package((12, 1))
    'deepspeed-ops-cubin-cu121'
    """
    return f"deepspeed-ops-cubin-cu{release[0]}{release[1]}"


def variants(version: str, known: Matrix | None = None) -> Mapping[str, tuple[str | OnPlatform, ...]]:
    """Keys and values of ``recipe/variants.yaml``.

    Args:
        version: of the packages.
        known: the matrix.
    """
    tables = known if known is not None else load()
    glibc = {p.glibc for p in tables.platforms.values() if p.glibc is not None}
    macos = next(p.wheel.split("_")[1:3] for p in tables.platforms.values() if p.name.startswith("macos"))
    return {
        "deepspeed_version": (version,),
        "python_min": (tables.pythons[0],),
        "torch_minimum": (tables.torch_minimum,),
        "tvm_ffi_minimum": (tables.ffi_minimum,),
        "tvm_ffi_below": (tables.ffi_below,),
        # The oldest CUDA major of the set: its machine code loads on every driver from that major on.
        "cuda_driver_minimum": (str(ship_releases(tables)[0][0]),),
        "gpu_code": ("cuda", "cpu"),
        "cuda_compiler": ("cuda-nvcc",),
        "cuda_compiler_version": tuple(dotted(release) for release in ship_releases(tables)),
        "c_stdlib": (
            OnPlatform("linux", "sysroot"),
            OnPlatform("osx", "macosx_deployment_target"),
            OnPlatform("win", "vs"),
        ),
        "c_stdlib_version": (OnPlatform("linux", dotted(max(glibc))), OnPlatform("osx", ".".join(macos))),
    }
