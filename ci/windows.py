"""The Windows side, built and run on Linux: what it can prove without a Windows machine, and the win_amd64 wheel.

python ci/windows.py prove    every op of the registry as a DLL by mingw-w64, loaded and called under wine, its numbers
                              compared with the Linux library's
python ci/windows.py wheel    dist/*-win_amd64.whl: those DLLs and the GPU parts of Linux' wheels (--archs LIST: fewer)

Needs x86_64-w64-mingw32-g++ (posix threads), for `prove` also g++ and wine; the Windows wheels of apache-tvm-ffi are
fetched with pip into build/windows. A mingw DLL is not the MSVC DLL: what is proved here is the source, the plan and
the calling convention; the native build is .github/workflows/windows.yml's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from op_builder import aot, matrix
from op_builder.commands import Problem
from op_builder.compile import build_part
from op_builder.errors import CompilerMissing, OpsError, UsageError
from op_builder.host import HostFacts, detect
from op_builder.manifest import read_manifest, read_pe
from op_builder.plan import package_version, plan_host
from op_builder.settings import Settings
from op_builder.spec import OpSpec, all_specs
from op_builder.store import Part, Store
from op_builder.toolchain import (
    FFI,
    Toolchain,
    discover_gpu,
    discover_host,
    find_ffi,
    find_host_compiler,
    find_ninja,
    runner,
)

PLATFORM = "windows-x86_64"
WINDOWS = HostFacts(*PLATFORM.split("-"))
WORK = ROOT / "build" / "windows"
TESTS = ROOT / "tests" / "windows"
PREFIX = "__tvm_ffi_"
_COMPILERS = ("x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-g++")
_WINE = ("wine64", "/usr/lib/wine/wine64", "wine")
# Flags of the user are for his own system's compiler; what is asked for by DS_BUILD_* is the registry here.
_NOT_OURS = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDA_HOME", "CUDA_PATH")


def say(line: str) -> None:
    """A line for people, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(argv: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout_s: float = 300.0) -> str:
    """Standard output of a command that has to succeed; without carriage returns.

    Raises:
        UsageError: it failed; ``why`` is the end of what it said.
    """
    done = subprocess.run(
        [str(a) for a in argv], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s,
        stdin=subprocess.DEVNULL, check=False, env=None if env is None else dict(env),
    )  # fmt: skip
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UsageError(f"{Path(argv[0]).name} ended with {done.returncode}", said, " ".join(map(str, argv)))
    return done.stdout.replace("\r\n", "\n")


def program(names: Sequence[str], package: str) -> Path:
    """The first program that exists.

    Raises:
        CompilerMissing: none does.
    """
    for name in names:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise CompilerMissing(f"{names[0]} was not found", "it is not on PATH", f"apt-get install {package}")


def settings(**extra: str) -> Settings:
    """The environment without what is meant for other builds."""
    env = {k: v for k, v in os.environ.items() if k not in _NOT_OURS and not k.startswith("DS_BUILD_")}
    return Settings.read({**env, "TORCH_EXTENSIONS_DIR": str(WORK / "store"), **extra})


# --- tools --------------------------------------------------------------------------------------------------------


def windows_ffi(version: str) -> Path:
    """The folder of an unpacked Windows wheel of apache-tvm-ffi, fetched if need be.

    Args:
        version: what a requirement says after the name.
    """
    tables = matrix.load()
    place = WORK / "ffi" / "".join(c if c.isalnum() else "_" for c in version)
    if not (place / tables.ffi_module).is_dir():
        say(f"fetching {tables.ffi_package}{version} for {tables.platform(PLATFORM).wheel}")
        with tempfile.TemporaryDirectory() as folder:
            asked = ("--platform", tables.platform(PLATFORM).wheel, "--python-version", tables.pythons[1])
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
            run([*pip, "--only-binary=:all:", *asked, "--dest", folder, f"{tables.ffi_package}{version}"])
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place.with_suffix(".part"))
        place.with_suffix(".part").rename(place)
    return place


def cross_toolchain(ffi_folder: Path) -> Toolchain:
    """mingw-w64 as the host compiler of a Windows host, NVRTC and nvcc of this one.

    Raises:
        CompilerMissing: a tool is missing.
    """
    wanted = settings(CXX=str(program(_COMPILERS, "g++-mingw-w64-x86-64-posix")))
    problems: list[Problem] = []
    compiler = find_host_compiler(wanted, WINDOWS, runner(wanted), problems)
    ffi = find_ffi(WINDOWS, [str(ffi_folder)])
    ninja = find_ninja(wanted.env)
    problems += [ffi] if isinstance(ffi, Problem) else []
    if compiler is None or not isinstance(ffi, FFI) or ninja is None:
        found = problems[0] if problems else Problem("ninja was not found", "", "pip install ninja")
        raise CompilerMissing(found.what, found.why, found.fix)
    gpu = discover_gpu(wanted, WINDOWS)
    return Toolchain(compiler, ninja, gpu.nvcc, gpu.nvrtc, ffi)


def host_part(spec: OpSpec, tools: Toolchain, host: HostFacts, store: Path) -> Part:
    """An op's host library, built or found in ``store``."""
    asked = settings()
    plan = plan_host(spec, tools, asked, host, ROOT / "csrc", package_version(ROOT))
    return build_part(plan, Store(store, "package"), asked, say, tools.ninja)


# --- the proof ----------------------------------------------------------------------------------------------------


class Wine:
    """A private Windows, gone afterwards; its programs see ``folder`` as their own."""

    def __init__(self, folder: Path) -> None:
        self.program = program(_WINE, "wine wine64")
        self.env = {
            **{k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")},
            "WINEPREFIX": str(folder),
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": "mscoree,mshtml,winemenubuilder.exe=",  # asks for no Mono, no browser, no menu
        }

    def __call__(self, *argv: str | Path) -> str:
        """Standard output of a Windows program."""
        return run([self.program, *argv], self.env)

    def version(self) -> str:
        """``wine-8.0 (Debian ...)``."""
        return self("--version").strip()

    def end(self) -> None:
        """Stop the server of this prefix and nothing else."""
        server = next((s for s in ("wineserver64", "wineserver") if (self.program.parent / s).is_file()), None)
        found = str(self.program.parent / server) if server else shutil.which("wineserver")
        if found:
            subprocess.run(
                [found, "-k"], env=self.env, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
                errors="replace", timeout=60, check=False,
            )  # fmt: skip


def compile_caller(source: Path, compiler: Path, ffi: FFI, out: Path, windows: bool) -> Path:
    """One of the small programs of tests/windows, for either system."""
    include = [f"-I{ROOT / 'csrc'}", *(word for folder in ffi.include for word in ("-isystem", str(folder)))]
    own = ("-static", "-DTVM_FFI_DLL=") if windows else ("-ldl",)
    out.parent.mkdir(parents=True, exist_ok=True)
    flags = ("-O1", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
    run([compiler, *flags, *include, source, "-o", out, *own])
    return out


def runtime_folder(ffi_folder: Path, part: Part, out: Path) -> Path:
    """A folder as Windows' loader wants it: the op, TVM-FFI's runtime and the C++ runtime its wheel brings."""
    out.mkdir(parents=True, exist_ok=True)
    runtime = [*ffi_folder.glob("*.libs/*.dll"), *(ffi_folder / "tvm_ffi").rglob("tvm_ffi.dll")]
    for file in (*runtime, part.path):
        shutil.copy(file, out / file.name)
    return out


def compare(op: str, windows: str, linux: str) -> str:
    """A line about two equal outputs.

    Raises:
        UsageError: they differ.
    """
    left, right = windows.splitlines(), linux.splitlines()
    if left != right:
        pairs = zip([*left, *[""] * len(right)], [*right, *[""] * len(left)], strict=False)
        first = next((f"Windows {a!r}, Linux {b!r}" for a, b in pairs if a != b), "")
        raise UsageError(f"{op} gives other numbers on Windows", f"{first} ({len(left)} and {len(right)} lines)", "")
    return f"{len(left)} lines equal to Linux, bit for bit"


def prove() -> None:
    """Build, load and call every op of the registry; write what was run to build/windows/proof.txt."""
    tables = matrix.load()
    # As a wheel is made: built against the oldest runtime, run with the oldest and the newest.
    oldest = windows_ffi(f"=={tables.ffi_minimum}")
    newest = windows_ffi(f">={tables.ffi_minimum},<{tables.ffi_below}")
    tools, here = cross_toolchain(oldest), detect({})
    own = discover_host(settings(), here)
    if own.host is None or own.ffi is None:
        raise CompilerMissing(own.problems[0].what, own.problems[0].why, own.problems[0].fix)
    assert tools.host is not None and tools.ffi is not None
    report: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ds-wine-") as prefix:
        wine = Wine(Path(prefix))
        try:
            report.append(f"{tools.host.identity}; {wine.version()}")
            say(report[0])
            for op, spec in all_specs().items():
                if not spec.host:
                    report.append(f"{op}: has no host library")
                    continue
                dll = host_part(spec, tools, WINDOWS, WORK / "parts")
                library = host_part(spec, own, here, WORK / "linux-parts")
                report += [f"{op}: {line}" for line in prove_op(op, dll, library, (oldest, newest), tools, own, wine)]
                say("\n".join(r for r in report if r.startswith(f"{op}: ")))
        finally:
            wine.end()
    (WORK / "proof.txt").write_text("\n".join(report) + "\n", encoding="utf-8")


def prove_op(
    op: str, dll: Part, library: Part, runtimes: Sequence[Path], tools: Toolchain, own: Toolchain, wine: Wine
) -> list[str]:
    """What was found out about one op."""
    assert tools.host is not None and tools.ffi is not None and own.host is not None and own.ffi is not None
    facts = read_pe(dll.path)
    offered = sorted(name.removeprefix(PREFIX) for name in facts.exports)
    lines = [f"{dll.path.name}, {dll.manifest.size} bytes, {facts.machine}, needs {', '.join(facts.needed)}"]
    bins = WORK / "bin"
    windows_gxx, linux_gxx = tools.host.path, own.host.path
    load = compile_caller(TESTS / "load_op.cpp", windows_gxx, tools.ffi, bins / "load_op.exe", True)
    load_here = compile_caller(TESTS / "load_op.cpp", linux_gxx, own.ffi, bins / "load_op", False)
    run([load_here, own.ffi.library, library.path, *offered])  # the Linux library offers all that the DLL does
    source = TESTS / f"call_{op}.cpp"
    for runtime in runtimes:
        folder = runtime_folder(runtime, dll, WORK / "run" / runtime.name / op)
        paths = (folder / "tvm_ffi.dll", folder / dll.path.name)
        wine(load, *paths, *offered)
        done = f"with tvm_ffi of {runtime.name.strip('_')}: loads, {len(offered)} functions"
        if source.is_file():
            call = compile_caller(source, windows_gxx, tools.ffi, bins / f"call_{op}.exe", True)
            call_here = compile_caller(source, linux_gxx, own.ffi, bins / f"call_{op}", False)
            done += ", " + compare(op, wine(call, *paths), run([call_here, own.ffi.library, library.path]))
        else:
            done += f"; not called: tests/windows/call_{op}.cpp does not exist"
        lines.append(done)
    return lines


# --- the wheel ----------------------------------------------------------------------------------------------------


def wheel(archs: str | None, out: Path) -> Path:
    """A wheel for Windows with every op's DLL and GPU parts, named by what its parts prove.

    Args:
        archs: an arch list instead of the matrix' ship set.
        out: folder of the wheel.
    """
    parts = WORK / "wheel-parts"
    shutil.rmtree(parts, ignore_errors=True)
    tools = cross_toolchain(windows_ffi(f"=={matrix.load().ffi_minimum}"))
    report = aot.build_ahead(parts, settings(), WINDOWS, list(all_specs()), archs, say, home=ROOT, toolchain=tools)
    say("\n".join(report.lines()))
    with tempfile.TemporaryDirectory(prefix="ds-wheel-") as folder:
        base, dist = Path(folder) / "build", Path(folder) / "dist"
        build = ("build", "--build-base", base, "build_ext", "--parts", parts, "bdist_wheel", "--dist-dir", dist)
        run([sys.executable, "setup.py", "-q", *build, "--bdist-dir", Path(folder) / "root"])
        (made,) = dist.glob("*.whl")
        check_wheel(made)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(made, out / made.name))


def check_wheel(path: Path) -> None:
    """Read a finished wheel back: tag, manifests and files agree, and every op of the registry has its DLL.

    Raises:
        UsageError: something in it contradicts its name.
        CorruptPart: a part differs from its manifest.
    """
    tag = matrix.load().platform(PLATFORM).wheel
    if not path.name.endswith(f"-py3-none-{tag}.whl"):
        raise UsageError(f"{path.name} has another tag", f"its parts should prove py3-none-{tag}", "")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        seen: set[tuple[str, str]] = set()
        for file in sorted(Path(folder).glob("deepspeed_ops/parts/*/*/*.json")):
            manifest = read_manifest(file)
            part = file.parent / manifest.filename
            manifest.verify(part)
            seen.add((manifest.op, manifest.variant))
            if manifest.kind == "host" and (manifest.platform, read_pe(part).machine) != (PLATFORM, WINDOWS.machine):
                raise UsageError(f"{part.name} in {path.name} is for {manifest.platform}", f"expected {PLATFORM}", "")
    lacking = [op for op, spec in all_specs().items() if spec.host and (op, PLATFORM) not in seen]
    if lacking:
        raise UsageError(f"{path.name} lacks host parts", ", ".join(lacking), "")


def main(arguments: list[str]) -> int:
    """Run a command; the exit code of the error if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prove", "wheel"))
    parser.add_argument("--archs", help="wheel: GPU architectures, as TORCH_CUDA_ARCH_LIST; default: the ship set")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="wheel: where it goes")
    options = parser.parse_args(arguments)
    try:
        if options.command == "prove":
            prove()
        else:
            say(f"wrote {wheel(options.archs, options.out)}")
    except OpsError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
