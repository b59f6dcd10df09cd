"""Where CUDA compilers are: every nvcc, and every NVRTC library, of this machine.

Nothing is loaded here: a second NVRTC in the process would answer torch's own request for that library. A release is
read from file names (NVRTC) or from the compiler's own answer (nvcc), never from folder names.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .commands import Problem, Run
from .matrix import Version, load
from .targets import Target, capability_of, supported_by

Source = Literal["loaded", "torch", "pypi", "conda", "system"]


@dataclass(frozen=True)
class Nvcc:
    """One nvcc.

    Attributes:
        path: the program to run.
        home: the toolkit it belongs to, as it says itself.
        version: CUDA release, ``(13, 0)``.
        archs: machine code it makes, by its own list; arch-specific and family forms are not listed.
        identity: enough to tell it from every other compiler, ``nvcc 13.0.88``.
    """

    path: Path
    home: Path
    version: tuple[int, int]
    archs: tuple[Target, ...]
    identity: str

    def targets(self, target: Target) -> bool:
        """Whether it compiles for ``target``."""
        return _compiles(self.archs, self.version, target)


@dataclass(frozen=True)
class Nvrtc:
    """One NVRTC library.

    Attributes:
        library: the library.
        builtins: its companion of the same release, to be loaded first; None where it is not beside it.
        version: CUDA release, ``(12, 8)``.
        archs: machine code the release makes, by the matrix; an opened library tells its own.
        source: who brought it.
    """

    library: Path
    builtins: Path | None
    version: tuple[int, int]
    archs: tuple[Target, ...]
    source: Source

    @property
    def identity(self) -> str:
        """``nvrtc 12.8``; size and build are part of it through the release alone."""
        return f"nvrtc {self.version[0]}.{self.version[1]}"

    def targets(self, target: Target) -> bool:
        """Whether it compiles for ``target``."""
        return _compiles(self.archs, self.version, target)


def release_archs(release: Version) -> tuple[Target, ...]:
    """Plain machine-code targets of a release, by the matrix."""
    return tuple(Target(*capability) for capability in load().targets_of(release))


def _compiles(archs: Sequence[Target], release: Version, target: Target) -> bool:
    if all(a.capability != target.capability for a in archs):
        return False
    # An architecture the matrix does not know yet: the compiler's word is enough for the plain form only.
    known = target.capability in load().archs
    return supported_by(target, release) if known else not target.suffix


# --- nvcc ---------------------------------------------------------------------------------------------------------


def nvcc_candidates(env: Mapping[str, str], cuda_home: str | None, paths: Sequence[str], root: Path) -> Iterator[Path]:
    """Places where an nvcc could be, in order of precedence; none is checked.

    ``CUDA_HOME``/``CUDA_PATH``, PATH, the conda environment, wheels on ``sys.path``, ``/usr/local/cuda*``, and where
    NVIDIA's installer for Windows puts toolkits.
    """
    name = "nvcc.exe" if os.name == "nt" else "nvcc"
    if cuda_home:
        yield Path(cuda_home) / "bin" / name
    found = shutil.which("nvcc", path=env.get("PATH", ""))
    if found:
        yield Path(found)
    for prefix in conda_prefixes(env):
        yield prefix / "bin" / name
        yield prefix / "Library" / "bin" / name
    for wheel in _wheel_folders(paths):
        yield wheel / "bin" / name
    for home in sorted((root / "usr/local").glob("cuda*"), key=lambda p: (p.name != "cuda", p.name)):
        yield home / "bin" / name
    for home in windows_toolkits(env):
        yield home / "bin" / name


def windows_toolkits(env: Mapping[str, str]) -> tuple[Path, ...]:
    """Toolkits of NVIDIA's installer for Windows, the newest first; the registry is not asked."""
    programs = env.get("PROGRAMFILES", env.get("ProgramFiles", ""))
    if not programs:
        return ()
    found = (Path(programs) / "NVIDIA GPU Computing Toolkit" / "CUDA").glob("v*.*")
    return tuple(sorted(found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], reverse=True))


def conda_prefixes(env: Mapping[str, str]) -> Iterator[Path]:
    """The conda environment this Python belongs to (activated or not), and the activated one."""
    own, active = Path(sys.prefix), env.get("CONDA_PREFIX", "")
    if (own / "conda-meta").is_dir() and str(own) != active:
        yield own
    if active:
        yield Path(active)


def _wheel_folders(paths: Iterable[str]) -> Iterator[Path]:
    for entry in paths:
        folder = Path(entry or ".") / "nvidia"
        if folder.is_dir():
            yield from sorted(folder.glob("cu[0-9]*"), reverse=True)
            yield from (folder / name for name in ("cuda_nvcc", "cuda_nvrtc") if (folder / name).is_dir())


def find_nvcc(
    env: Mapping[str, str],
    cuda_home: str | None,
    run: Run,
    *,
    paths: Sequence[str] = (),
    root: Path = Path("/"),
) -> tuple[tuple[Nvcc, ...], tuple[Problem, ...]]:
    """Every usable nvcc, the one the user asked for first, each toolkit once; and what is wrong with the others."""
    found: dict[Path, Nvcc] = {}
    problems: list[Problem] = []
    tried: set[Path] = set()
    for candidate in nvcc_candidates(env, cuda_home, paths, root):
        real = candidate.resolve()
        if real in tried:
            continue
        tried.add(real)
        if not candidate.is_file():
            if cuda_home and candidate.parent.parent == Path(cuda_home):
                what = f"CUDA_HOME={cuda_home!r} holds no nvcc"
                fix = "set CUDA_HOME to a toolkit's folder, or unset it: NVRTC compiles GPU code without a toolkit"
                problems.append(Problem(what, f"{candidate} does not exist", fix))
            continue
        nvcc = ask_nvcc(candidate, run)
        if isinstance(nvcc, Problem):
            problems.append(nvcc)
        else:
            found.setdefault(nvcc.home.resolve(), nvcc)
    return tuple(found.values()), tuple(problems)


def ask_nvcc(path: Path, run: Run) -> Nvcc | Problem:
    """Release, toolkit folder and architectures of one nvcc, by its own answers (it can be a wrapper script)."""
    if path.is_file() and not os.access(path, os.X_OK):  # as wheels unpack it
        fix = f"chmod +x {shlex.quote(str(path))} and its fellows in bin and nvvm/bin"
        return Problem(f"{path} does not work", "it may not be executed", fix)
    answer = run([str(path), "--version"])
    match = re.search(r"release (\d+)\.(\d+)(?:, V([\d.]+))?", answer.output)
    if not answer.ok or match is None:
        why = answer.why or (answer.output.strip().splitlines() or [f"exit code {answer.returncode}"])[0]
        return Problem(f"{path} does not work", why, "install the CUDA toolkit again, or take it off PATH")
    # A dry run names the toolkit without compiling; the source need not exist.
    dry = run([str(path), "--dryrun", "x.cu"])
    top = re.search(r"^#\$ TOP=(.*)$", dry.output, re.MULTILINE)
    home = Path(os.path.normpath(top[1].strip().strip('"'))) if top else path.resolve().parent.parent
    listed = run([str(path), "--list-gpu-arch"])
    numbers = sorted({int(n) for n in re.findall(r"\bcompute_(\d+)\b", listed.stdout)})
    release = (int(match[1]), int(match[2]))
    archs = tuple(Target(*capability_of(n)) for n in numbers) if numbers else release_archs(release)
    return Nvcc(path, home, release, archs, f"nvcc {match[3] or '.'.join(map(str, release))}")


# --- NVRTC --------------------------------------------------------------------------------------------------------

_LINUX_LIBRARY = re.compile(r"libnvrtc(-[0-9a-f]+)?\.so(\.\d+)*")
_LINUX_BUILTINS = re.compile(r"libnvrtc-builtins(-[0-9a-f]+)?\.so\.(\d+)\.(\d+)(\.\d+)*")
_WINDOWS_LIBRARY = re.compile(r"nvrtc64_\d+_\d+\.dll", re.IGNORECASE)
_WINDOWS_BUILTINS = re.compile(r"nvrtc-builtins64_(\d+)(\d)\.dll", re.IGNORECASE)


def nvrtc_in(folder: Path, source: Source) -> Nvrtc | None:
    """The NVRTC library of one folder, the newest where several lie there; None without one.

    Its release is that of its companion (``libnvrtc-builtins.so.12.8``), else of its own full name.
    """
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError:
        return None
    libraries = [n for n in names if _LINUX_LIBRARY.fullmatch(n) or _WINDOWS_LIBRARY.fullmatch(n)]
    found = [n for n in (_from_library(folder, name, names, source) for name in libraries) if n is not None]
    return max(found, key=lambda n: (n.version, -len(n.library.name)), default=None)


def _from_library(folder: Path, name: str, names: Sequence[str], source: Source) -> Nvrtc | None:
    companions = {r: folder / n for n in names if (r := _builtins_release(n)) is not None}
    own = _own_release(folder / name)
    if len(own) >= 2:
        version = (own[0], own[1])
    else:
        fitting = [v for v in companions if not own or v[0] == own[0]]
        if not fitting:
            return None
        version = max(fitting)
    return Nvrtc(folder / name, companions.get(version), version, release_archs(version), source)


def _builtins_release(name: str) -> tuple[int, int] | None:
    linux, windows = _LINUX_BUILTINS.fullmatch(name), _WINDOWS_BUILTINS.fullmatch(name)
    if linux is not None:
        return int(linux[2]), int(linux[3])
    return (int(windows[1]), int(windows[2])) if windows is not None else None


def _own_release(library: Path) -> Version:
    """``(12,)`` of ``libnvrtc.so.12``, ``(12, 4, 127)`` where it is a link to the full name, ``(12,)`` of a DLL's."""
    real = library.resolve().name
    name = real if _LINUX_LIBRARY.fullmatch(real) else library.name
    windows = re.fullmatch(r"nvrtc64_(\d+)\d_\d+\.dll", library.name, re.IGNORECASE)
    if windows is not None:
        return (int(windows[1]),)
    return tuple(int(n) for n in name.partition(".so")[2].split(".") if n)


def loaded_nvrtc(maps: str) -> Iterator[Path]:
    """NVRTC libraries this process holds already, by the text of ``/proc/self/maps``."""
    seen: set[str] = set()
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5] if line.count(" ") >= 5 and "/" in line else ""
        if path and path not in seen and _LINUX_LIBRARY.fullmatch(path.rpartition("/")[2]):
            seen.add(path)
            yield Path(path)


def nvrtc_folders(
    env: Mapping[str, str], homes: Iterable[Path], paths: Sequence[str], torch: Path | None, root: Path
) -> Iterator[tuple[Path, Source]]:
    """Folders that can hold an NVRTC, in order of precedence: torch's own first, the system's last."""
    if torch is not None:
        yield torch / "lib", "torch"
    for wheel in _wheel_folders(paths):
        beside_torch = torch is not None and wheel.parent.parent == torch.parent
        for sub in ("lib", "bin", "bin/x86_64", "bin/x64"):
            yield wheel / sub, "torch" if beside_torch else "pypi"
    for prefix in conda_prefixes(env):
        for sub in ("lib", "Library/bin", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield prefix / sub, "conda"
    for home in (*homes, *windows_toolkits(env)):
        for sub in ("lib64", "lib", "bin", "bin/x64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield home / sub, "system"
    for home in sorted((root / "usr/local").glob("cuda*")):
        yield home / "lib64", "system"
    for machine in ("x86_64-linux-gnu", "aarch64-linux-gnu"):
        yield root / "usr/lib" / machine, "system"


def find_nvrtc(
    folders: Iterable[tuple[Path, Source]], loaded: Iterable[Path] = (), listed: Callable[[], Iterable[Path]] = tuple
) -> tuple[Nvrtc, ...]:
    """Every NVRTC, the one in use first, each library once.

    Args:
        folders: from :func:`nvrtc_folders`.
        loaded: libraries this process holds.
        listed: libraries of the linker's cache; asked only where the folders hold none.
    """
    found: dict[Path, Nvrtc] = {}

    def add(nvrtc: Nvrtc | None) -> None:
        if nvrtc is not None:
            found.setdefault(nvrtc.library.resolve(), nvrtc)

    for library in loaded:
        try:
            names = [p.name for p in library.parent.iterdir()]
        except OSError:
            names = []
        add(_from_library(library.parent, library.name, names, "loaded"))
    for folder, source in folders:
        add(nvrtc_in(folder, source))
    if not found:
        for library in listed():
            add(nvrtc_in(library.parent, "system"))
    return tuple(found.values())


def parse_ldconfig(text: str) -> tuple[Path, ...]:
    """NVRTC libraries in the output of ``ldconfig -p``."""
    lines = (line.partition(" => ") for line in text.splitlines())
    return tuple(Path(path.strip()) for left, _, path in lines if left.strip().startswith("libnvrtc.so") and path)
