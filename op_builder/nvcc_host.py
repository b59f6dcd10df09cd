"""The C++ compiler behind nvcc: which one, and whether this nvcc takes it. NVRTC, which is preferred, needs none."""

from __future__ import annotations

from . import faults, matrix
from .commands import Problem, Run
from .host import HostFacts
from .settings import Settings
from .toolchain import HostCompiler, find_host_compiler, runner


def unfit_for_nvcc(compiler: HostCompiler, release: tuple[int, int]) -> Problem | None:
    """Why the nvcc of a CUDA release refuses a host compiler, by the matrix; None where it does not.

    A release that the matrix does not list counts as the newest listed one below it.
    """
    rows = [row for pair, row in matrix.load().cuda.items() if pair <= release]
    if not rows:
        return None
    kind = compiler.family
    allowed = {"gcc": rows[-1].gcc, "clang": rows[-1].clang, "msvc": rows[-1].msvc}[kind]
    if allowed.holds(compiler.version):
        return None
    below = matrix.dotted(allowed.below) if allowed.below else ""
    return faults.compiler_unfit_for_nvcc(kind, compiler.version, release, matrix.dotted(allowed.low), below)


def host_of_nvcc(
    settings: Settings, host: HostFacts, release: tuple[int, int], run: Run | None = None
) -> HostCompiler | Problem | None:
    """What to pass to nvcc as its host compiler.

    On Windows nvcc itself finds ``cl`` in a developer prompt only, and takes no other. Elsewhere it finds the system's
    compiler, so one is passed only where the user names it.
    """
    if host.system != "windows" and not settings.cxx:
        return None
    problems: list[Problem] = []
    found = find_host_compiler(settings, host, run or runner(settings), problems)
    if found is None:
        return problems[0]
    return unfit_for_nvcc(found, release) or found
