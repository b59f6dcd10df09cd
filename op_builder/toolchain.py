"""The compilers and build tools of this machine. Looks lazily: a host build never asks for CUDA, and vice versa."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import cuda_toolkits, faults, matrix, toolchain_msvc
from .commands import Completed, Problem, Run
from .cuda_toolkits import Nvcc, Nvrtc
from .host import HostFacts
from .settings import Settings
from .toolchain_ffi import FFI, find_ffi

__all__ = [
    "FFI",
    "Completed",
    "HostCompiler",
    "Nvcc",
    "Nvrtc",
    "Problem",
    "Run",
    "Toolchain",
    "discover",
    "discover_gpu",
    "discover_host",
    "find_ffi",
    "run_command",
]


Kind = Literal["gcc", "clang", "msvc", "clang-cl", "mingw"]


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler of host libraries.

    Attributes:
        kind: whose command line it takes: ``gcc``, ``clang``, ``msvc`` (``cl``), ``clang-cl``, or ``mingw`` (gcc that
            makes Windows DLLs, here or from Linux).
        path: the program.
        version: ``(12, 2, 0)``.
        target: what it compiles for, ``x86_64-linux-gnu``.
        identity: enough to tell it from every other compiler.
        argv: the whole command prefix (``CXX="ccache g++ -m64"`` has three words).
        env: variables its programs need beyond the environment (Visual Studio's), as pairs.
    """

    kind: Kind
    path: Path
    version: tuple[int, ...]
    target: str
    identity: str
    argv: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def family(self) -> Literal["gcc", "clang", "msvc"]:
        """Whose version numbers it has, as ``ci/matrix.toml`` lists them."""
        if self.kind == "msvc":
            return "msvc"
        return "gcc" if self.kind in ("gcc", "mingw") else "clang"

    @property
    def takes_msvc_flags(self) -> bool:
        """Whether its command line is that of ``cl``."""
        return self.kind in ("msvc", "clang-cl")


@dataclass(frozen=True)
class Toolchain:
    """Every tool found, and what is wrong with those that are missing."""

    host: HostCompiler | None = None
    ninja: Path | None = None
    nvcc: tuple[Nvcc, ...] = ()
    nvrtc: tuple[Nvrtc, ...] = ()
    ffi: FFI | None = None
    problems: tuple[Problem, ...] = ()


def run_command(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 30.0
) -> Completed:
    """Run a command to its end, without a terminal or standard input. Never raises."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env=None if env is None else dict(env),
            cwd=cwd,
            check=False,
            # A console of its own on Windows: no window flashes up, and `chcp` changes nobody else's code page.
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except subprocess.TimeoutExpired:
        return Completed(-1, why=f"{argv[0]} did not answer within {timeout_s:g} s")
    except (OSError, ValueError) as exc:
        return Completed(-1, why=f"{argv[0]} cannot run: {exc}")
    return Completed(done.returncode, done.stdout, done.stderr)


def runner(settings: Settings) -> Run:
    """Runs commands in the user's environment, with messages in one language: they are matched, and shown."""
    return functools.partial(run_command, env={**settings.env, "LC_ALL": "C", "VSLANG": "1033"})


# --- host side ----------------------------------------------------------------------------------------------------


def discover_host(settings: Settings, host: HostFacts, *, run: Run | None = None) -> Toolchain:
    """C++ compiler, ninja and apache-tvm-ffi. Runs ``g++ --version`` and ``-dumpmachine`` at most."""
    problems: list[Problem] = []
    compiler = find_host_compiler(settings, host, run or runner(settings), problems)
    ninja = find_ninja(settings.env)
    if ninja is None:
        problems.append(Problem("ninja was not found", "neither the module ninja nor PATH has it", "pip install ninja"))
    ffi = find_ffi(host)
    if isinstance(ffi, Problem):
        problems.append(ffi)
    return Toolchain(compiler, ninja, ffi=ffi if isinstance(ffi, FFI) else None, problems=tuple(problems))


def find_host_compiler(settings: Settings, host: HostFacts, run: Run, problems: list[Problem]) -> HostCompiler | None:
    """The compiler the user names (``CXX``, else ``CC``), else the system's usual one; reasons go to ``problems``.

    A named compiler that does not work is a problem, not a reason to take another one.
    """
    named = settings.cxx or _cxx_of(settings.cc)
    if named:
        argv = _words(named, host.system)
        found = _ask_compiler(argv, settings, host, run) if argv else Problem("CXX is empty", "", "unset CXX")
        if isinstance(found, Problem):
            problems.append(found)
            return None
        return _supported(found, problems)
    if host.system == "windows":
        answer = toolchain_msvc.find_msvc(settings.env, run, host.machine)
        if isinstance(answer, Problem):
            problems.append(answer)
            return None
        return _supported(_from_msvc(answer), problems)
    names = ("clang++", "g++", "c++") if host.system == "macos" else ("g++", "clang++", "c++")
    for name in names:
        if shutil.which(name, path=settings.env.get("PATH", "")):
            found = _ask_compiler([name], settings, host, run)
            if isinstance(found, HostCompiler):
                return _supported(found, problems)
            problems.append(found)
    if not problems:
        fix = {"macos": "xcode-select --install"}.get(host.system, "apt-get install g++, or conda install cxx-compiler")
        fix = "apk add g++" if host.libc == "musl" else fix
        problems.append(Problem("no C++ compiler was found", f"PATH has none of {', '.join(names)}", fix))
    return None


def _words(command: str, system: str) -> list[str]:
    if system == "windows" and Path(command).is_file():
        return [command]  # an unquoted path with blanks
    try:
        words = shlex.split(command, posix=system != "windows")
    except ValueError:
        return [command]
    return [w.strip('"') for w in words] if system == "windows" else words


def _cxx_of(cc: str | None) -> str | None:
    """The C++ driver that belongs to a C compiler: ``g++-12`` for ``gcc-12``; the compiler itself where none does."""
    if not cc:
        return None
    folder, name = re.fullmatch(r"(.*[/\\])?(.*)", cc, re.DOTALL).groups()  # type: ignore[union-attr]
    for c, cxx in ((r"\bgcc\b", "g++"), (r"\bclang(?!\+\+|-cl)\b", "clang++"), (r"\bcc\b", "c++")):
        changed = re.sub(c, cxx, name, count=1)
        if changed != name:
            return (folder or "") + changed
    return cc


def _ask_compiler(argv: list[str], settings: Settings, host: HostFacts, run: Run) -> HostCompiler | Problem:
    program = shutil.which(argv[0], path=settings.env.get("PATH", ""))
    if program is None:
        fix = "set CXX to an installed C++ compiler, or unset it"
        return Problem(f"C++ compiler {argv[0]!r} was not found", "it is no file and not on PATH", fix)
    if Path(program).stem.lower() == "cl":
        found = toolchain_msvc.ask_cl(Path(program), run, host.machine)
        return found if isinstance(found, Problem) else _from_msvc(found)
    argv = [program, *argv[1:]]  # what was looked up is what is asked, whatever PATH the child sees
    answer = run([*argv, "--version"])
    parsed = parse_compiler_version(answer.stdout)
    if not answer.ok or parsed is None:
        why = answer.why or (answer.output.strip().splitlines() or [f"exit code {answer.returncode}"])[0]
        fix = "install it again, or set CXX to another C++ compiler"
        return Problem(f"{shlex.join(argv)} --version does not work", why, fix)
    kind, version, target = parsed
    if not target:
        target = run([*argv, "-dumpmachine"]).stdout.strip()
    style = _style(kind, Path(program), target, host.system)
    if isinstance(style, Problem):
        return style
    first = answer.stdout.strip().splitlines()[0]
    # The program may be a wrapper (ccache g++); the compiler's own first line and target tell what it is.
    identity = f"{first} [{target}]" + (f" {shlex.join(argv[1:])}" if len(argv) > 1 else "")
    return HostCompiler(style, Path(program), version, target, identity, tuple(argv))


def _style(kind: Literal["gcc", "clang"], program: Path, target: str, system: str) -> Kind | Problem:
    """How to talk to a compiler, or why it makes nothing that this system's Python loads."""
    foreign = re.search(r"cygwin|msys|mingw|windows|darwin|linux", target)
    made_for = {"mingw": "windows", "darwin": "macos"}.get(foreign[0], foreign[0]) if foreign else system
    if made_for != system:
        return faults.compiler_of_another_system(str(program), target, system)
    if system != "windows":
        return kind
    if kind == "gcc":
        return "mingw"
    if program.stem.lower().startswith("clang-cl"):
        return "clang-cl"
    return faults.clang_without_msvc_command_line(str(program), target)


def parse_compiler_version(
    text: str,
) -> tuple[Literal["gcc", "clang"], tuple[int, ...], str] | None:
    """Kind, version and target in the answer of ``--version``; None for anything else.

    >>> parse_compiler_version("g++ (Debian 12.2.0-14) 12.2.0\\nCopyright (C) 2022 Free Software Foundation, Inc.")
    ('gcc', (12, 2, 0), '')
    """
    clang = re.search(r"clang version (\d+(?:\.\d+)*)", text)
    if clang is not None:
        target = re.search(r"^Target: (\S+)", text, re.MULTILINE)
        return "clang", tuple(int(n) for n in clang[1].split(".")), target[1] if target else ""
    gcc = re.match(r"[^\n]*?\([^\n]*?\)\s+(\d+(?:\.\d+)*)", text)
    if gcc is not None and "Free Software Foundation" in text:
        return "gcc", tuple(int(n) for n in gcc[1].split(".")), ""
    return None


def _from_msvc(found: toolchain_msvc.Msvc) -> HostCompiler:
    return HostCompiler("msvc", found.path, found.version, found.target, found.identity, (str(found.path),), found.env)


def _supported(compiler: HostCompiler, problems: list[Problem]) -> HostCompiler | None:
    allowed = matrix.load().host_compilers[compiler.family]
    if allowed.holds(compiler.version):
        return compiler
    version = matrix.dotted(compiler.version)
    problems.append(faults.compiler_out_of_range(str(compiler.path), compiler.family, version, str(allowed)))
    return None


def find_ninja(env: Mapping[str, str]) -> Path | None:
    """The ninja program: of the module ``ninja``, else beside this Python, else on PATH."""
    name = "ninja.exe" if os.name == "nt" else "ninja"
    spec = importlib.util.find_spec("ninja")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    scripts = Path(sys.executable).parent
    # Wheels of ninja keep the program in the package, or in the scripts folder of where they were installed.
    folders = [f for place in places for f in (place / "data" / "bin", place.parent / "bin")]
    for folder in (*folders, scripts, scripts / "Scripts"):
        if (folder / name).is_file() and os.access(folder / name, os.X_OK):
            return folder / name
    found = shutil.which("ninja", path=env.get("PATH", "")) or shutil.which("ninja-build", path=env.get("PATH", ""))
    return Path(found) if found else None


# --- GPU side -----------------------------------------------------------------------------------------------------


def discover_gpu(
    settings: Settings,
    host: HostFacts,
    *,
    run: Run | None = None,
    paths: Sequence[str] | None = None,
    root: Path = Path("/"),
) -> Toolchain:
    """Every nvcc and NVRTC, the ones to prefer first. Loads no library.

    Args:
        settings: environment and ``CUDA_HOME``.
        host: the machine.
        run: runs commands.
        paths: where wheels lie; default ``sys.path``.
        root: where the file system starts.
    """
    run = run or runner(settings)
    paths = sys.path if paths is None else paths
    nvcc, problems = cuda_toolkits.find_nvcc(settings.env, settings.cuda_home, run, paths=paths, root=root)
    homes = [*([Path(settings.cuda_home)] if settings.cuda_home else []), *(n.home for n in nvcc)]
    folders = cuda_toolkits.nvrtc_folders(settings.env, homes, paths, _torch_folder(paths), root)
    maps = root / "proc/self/maps"
    loaded: tuple[Path, ...] = ()
    if host.system == "linux" and maps.is_file():
        loaded = tuple(cuda_toolkits.loaded_nvrtc(maps.read_text(encoding="utf-8", errors="replace")))
    elif host.system == "windows":
        loaded = toolchain_msvc.loaded_dlls("nvrtc64_*.dll")

    def cached() -> tuple[Path, ...]:
        program = shutil.which("ldconfig", path=settings.env.get("PATH", "") + os.pathsep + "/sbin")
        return cuda_toolkits.parse_ldconfig(run([program, "-p"]).stdout) if program else ()

    nvrtc = cuda_toolkits.find_nvrtc(folders, loaded, cached)
    if not nvcc and not nvrtc:
        problems = (*problems, _no_gpu_compiler(host))
    return Toolchain(nvcc=nvcc, nvrtc=nvrtc, problems=tuple(problems))


def _torch_folder(paths: Sequence[str]) -> Path | None:
    spec = importlib.machinery.PathFinder.find_spec("torch", list(paths))
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _no_gpu_compiler(host: HostFacts) -> Problem:
    majors = [r for r in matrix.load().cuda.values() if r.torch]
    cuda = host.driver.cuda if host.driver else None
    fitting = [r for r in majors if cuda is None or r.release[0] <= cuda[0]] or majors
    why = "neither nvcc nor NVRTC lies in torch's wheels, on sys.path, in conda, in /usr/local or in the linker's cache"
    return Problem("no compiler for GPU code was found", why, f"pip install {fitting[-1].nvrtc}")


def discover(settings: Settings, host: HostFacts, *, run: Run | None = None) -> Toolchain:
    """Both sides in one value."""
    own, gpu = discover_host(settings, host, run=run), discover_gpu(settings, host, run=run)
    return Toolchain(own.host, own.ninja, gpu.nvcc, gpu.nvrtc, own.ffi, (*own.problems, *gpu.problems))
