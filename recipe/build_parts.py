"""Build this recipe's parts into ``$PREFIX/share/deepspeed-ops``: the plan is op_builder's, as everywhere.

python build_parts.py host    every op's host library for ``target_platform``, against the apache-tvm-ffi of ``$PREFIX``
python build_parts.py gpu     the GPU parts of the ship set that CUDA ``cuda_compiler_version`` has to make

What cannot be built fails the build: a package never lacks a part silently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from op_builder import matrix
from op_builder.aot import targets_for
from op_builder.choose import choose_device_compiler
from op_builder.commands import Problem
from op_builder.compile import build
from op_builder.errors import CompilerMissing, OpsError, UsageError
from op_builder.host import HostFacts
from op_builder.plan import CompilePlan, PartPlan, package_version, plan_device, plan_host
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.store import Store
from op_builder.toolchain import (
    FFI,
    Toolchain,
    discover_gpu,
    find_ffi,
    find_host_compiler,
    find_ninja,
    runner,
)

# conda's own names for what brings a missing tool.
_PACKAGES = {"ninja": "ninja", "apache-tvm-ffi": "apache-tvm-ffi", "C++ compiler": "cxx-compiler"}


def target_host(env: Mapping[str, str]) -> HostFacts:
    """The machine that ``target_platform`` (``linux-aarch64``) stands for.

    Raises:
        UsageError: the matrix has no such platform.
    """
    wanted = env.get("target_platform", "")
    for platform in matrix.load().platforms.values():
        if platform.conda == wanted:
            system, _, machine = platform.name.partition("-")
            return HostFacts(system, machine, "glibc" if system == "linux" else "")
    known = ", ".join(p.conda for p in matrix.load().platforms.values())
    raise UsageError(f"target_platform={wanted!r} is not in ci/matrix.toml", f"known: {known}", "use one of these")


def host_parts(settings: Settings) -> Iterator[PartPlan]:
    """The host library of every op."""
    host = target_host(settings.env)
    problems: list[Problem] = []
    if not settings.cxx and host.system != "windows":  # conda's compilers set it; the system's own is not asked
        raise CompilerMissing("no C++ compiler of conda's is here", "CXX is not set", "")
    compiler = find_host_compiler(settings, host, runner(settings), problems)
    ffi = find_ffi(host, site_packages(Path(settings.env["PREFIX"]), host))
    if isinstance(ffi, Problem):
        problems.append(ffi)
    tools = Toolchain(compiler, ffi=ffi if isinstance(ffi, FFI) else None, problems=tuple(problems))
    for spec in all_specs().values():
        if spec.host:
            yield plan_host(spec, tools, settings, host, ROOT / "csrc", package_version(ROOT))


def site_packages(prefix: Path, host: HostFacts) -> list[str]:
    """Where the host environment keeps Python packages, whichever Python it has."""
    if host.system == "windows":
        return [str(prefix / "Lib" / "site-packages")]
    return [str(p) for p in (*sorted(prefix.glob("lib/python3*/site-packages")), prefix / "site-packages")]


def gpu_parts(settings: Settings) -> Iterator[PartPlan]:
    """The ship set's GPU parts that belong to one CUDA release.

    Raises:
        MatrixError: ``cuda_compiler_version`` names a release that ci/matrix.toml lacks.
        UsageError: the ship set needs nothing of that release.
        CompilerMissing: no compiler of that very release is here.
    """
    text = settings.env.get("cuda_compiler_version", "")
    tables = matrix.load()
    release = tables.release(matrix.parse_version(text)).release
    found_here = discover_gpu(settings, HostFacts("linux", "x86_64", "glibc"), paths=sys.path)
    own = Path(settings.env["BUILD_PREFIX"]).resolve()
    tools = Toolchain(  # a toolkit of the system's is not asked
        nvcc=tuple(c for c in found_here.nvcc if own in c.path.resolve().parents),
        nvrtc=tuple(c for c in found_here.nvrtc if own in c.library.resolve().parents),
    )
    found = False
    for spec in all_specs().values():
        wanted = targets_for(spec, Settings.read({}), None)
        for target in (t for t, by in wanted.items() if by == release):
            found = True
            compiler = choose_device_compiler(target, tools, release=release)
            yield plan_device(spec, target, compiler, ROOT / "csrc", package_version(ROOT))
    if not found:
        allowed = sorted(
            {matrix.dotted(r) for s in all_specs().values() for r in targets_for(s, Settings.read({})).values() if r}
        )
        why = f"the ship set of ci/matrix.toml is made by: {', '.join(allowed)}"
        raise UsageError(f"cuda_compiler_version {text} in variants.yaml makes no GPU part", why, "make gen")


def main(arguments: list[str]) -> int:
    """Build one kind; 0 if every part is there."""
    kinds = {"host": host_parts, "gpu": gpu_parts}
    if len(arguments) != 1 or arguments[0] not in kinds:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    out = Path(os.environ["PREFIX"]) / "share" / "deepspeed-ops"
    work = Path(os.environ.get("SRC_DIR", out)) / ".jit"
    settings = Settings.read({**os.environ, "TORCH_EXTENSIONS_DIR": str(work)})
    try:
        plans = tuple(kinds[arguments[0]](settings))
        parts = build(CompilePlan(plans), Store(out, "package", logs=work), settings, print, find_ninja(settings.env))
    except CompilerMissing as exc:
        package = next((p for word, p in _PACKAGES.items() if word in f"{exc.what} {exc.why}"), "cuda-nvcc")
        sys.stderr.write(f"error: {exc}\n  conda package: {package} (requirements.build of recipe/recipe.yaml)\n")
        return exc.exit_code
    except OpsError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    for name in (".work", ".locks"):
        for path in sorted((out / name).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if (out / name).is_dir():
            (out / name).rmdir()
    for part in parts:
        print(
            f"built {part.manifest.op} {part.manifest.variant} by {part.manifest.compiler}, {part.manifest.size} bytes"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
