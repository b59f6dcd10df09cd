"""Visual Studio's compiler on Windows: through PATH (a developer prompt), else through vswhere and its own script.

Nothing here reads the registry, needs a prompt of a certain kind or an administrator. What a machine answers comes
through ``run``, so recorded answers of Windows machines stand in for one under test.
"""

from __future__ import annotations

import ctypes
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any

from . import faults
from .commands import Problem, Run

_COMPONENT = {
    "x86_64": "Microsoft.VisualStudio.Component.VC.Tools.x86.x64",
    "aarch64": "Microsoft.VisualStudio.Component.VC.Tools.ARM64",
}
# Script and folder names per machine.
_SCRIPT = {"x86_64": "vcvars64.bat", "aarch64": "vcvarsarm64.bat"}
_FOLDER = {"x86_64": "x64", "aarch64": "arm64"}
_CL_TARGETS = {"x64": "x86_64", "arm64": "aarch64", "x86": "i386", "80x86": "i386", "arm": "arm"}
# What the script changes for other reasons than compiling; PATH, INCLUDE, LIB and the tools' own folders matter.
_WANTED = re.compile(r"PATH|INCLUDE|LIB|LIBPATH|(VC|VS|WINDOWSSDK|WINDOWSLIB|UCRT|UNIVERSALCRT)\w*")
# The script takes seconds: its answer holds for this process, whichever op asks.
_captured: dict[tuple[str, str], Mapping[str, str]] = {}


@dataclass(frozen=True)
class Msvc:
    """One ``cl``: program, version, target (``x86_64-windows-msvc``), identity, variables it needs."""

    path: Path
    version: tuple[int, ...]
    target: str
    identity: str
    env: tuple[tuple[str, str], ...]


def find_msvc(env: Mapping[str, str], run: Run, machine: str) -> Msvc | Problem:
    """The ``cl`` of this prompt if it compiles for ``machine``, else that of the newest Visual Studio.

    Args:
        env: the environment; names in any case, as Windows takes them.
        run: runs commands.
        machine: ``x86_64`` or ``aarch64``.
    """
    env = {name.upper(): value for name, value in env.items()}
    here = _of_prompt(env, run, machine)
    if isinstance(here, Msvc):
        return here
    found = _of_visual_studio(env, run, machine)
    # A prompt for another machine is the better reason where nothing else was found.
    return here if isinstance(found, Problem) and here is not None else found


def _of_prompt(env: Mapping[str, str], run: Run, machine: str) -> Msvc | Problem | None:
    """The ``cl`` of a developer prompt; None where this is none, a problem where it is one for another machine."""
    on_path = shutil.which("cl", path=env.get("PATH", ""))
    if not on_path or not env.get("INCLUDE"):
        return None
    found = ask_cl(Path(on_path), run, machine)
    if isinstance(found, Problem):
        return found
    if found.target != f"{machine}-windows-msvc":
        return faults.cl_of_another_machine(on_path, found.target, machine)
    if not _has_sdk(env):
        return faults.no_windows_sdk("this prompt")
    return replace(found, env=_needed({}, env, str(PureWindowsPath(on_path).parent)))


def _of_visual_studio(env: Mapping[str, str], run: Run, machine: str) -> Msvc | Problem:
    programs = env.get("PROGRAMFILES(X86)") or env.get("PROGRAMFILES") or "C:\\Program Files (x86)"
    vswhere = PureWindowsPath(programs) / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    component = _COMPONENT.get(machine, _COMPONENT["x86_64"])
    # -products *: the Build Tools are none of the editions that count by default. -utf8: folder names in any script.
    answer = run(
        [str(vswhere), "-products", "*", "-requires", component, "-latest", "-format", "json", "-utf8", "-nologo"]
    )
    if not answer.ok:
        return faults.no_visual_studio(f"cl is not on PATH and {answer.why or f'{vswhere} failed'}")
    try:
        places = [str(found["installationPath"]) for found in json.loads(answer.stdout or "[]")]
    except (ValueError, KeyError, TypeError) as exc:
        return faults.vswhere_unreadable(f"{type(exc).__name__}: {exc}")
    if not places:
        return faults.no_cpp_tools(component)
    return _activate(PureWindowsPath(places[0]), env, run, machine)


def _activate(place: PureWindowsPath, env: Mapping[str, str], run: Run, machine: str) -> Msvc | Problem:
    script = place / "VC" / "Auxiliary" / "Build" / _SCRIPT.get(machine, _SCRIPT["x86_64"])
    values = _variables(script, env, run)
    if isinstance(values, Problem):
        return values
    kind = _FOLDER.get(machine, "x64")
    folder = PureWindowsPath(values["VCTOOLSINSTALLDIR"]) / "bin" / f"Host{kind}" / kind
    found = ask_cl(Path(str(folder / "cl.exe")), run, machine)
    if isinstance(found, Problem):
        return found
    if not _has_sdk(values):
        return faults.no_windows_sdk(str(script))
    return replace(found, env=_needed(env, values, str(folder)))


def _variables(script: PureWindowsPath, env: Mapping[str, str], run: Run) -> Mapping[str, str] | Problem:
    """The environment after ``script``, names in capitals; run once per process."""
    key = (str(script), env.get("PATH", ""))
    if key not in _captured:
        # Code page 65001 makes the output UTF-8 (the child has a console of its own: the user's keeps its page). It is
        # joined by one `&`, since setting it can fail where there is no console, and ASCII still comes through then.
        command = ["cmd", "/d", "/c", "chcp", "65001", ">nul", "&", "call", str(script), ">nul", "&&", "set"]
        answer = run(command)
        lines = (line.partition("=") for line in answer.stdout.splitlines())
        values = {name.upper(): value for name, equals, value in lines if name and equals}
        if not answer.ok or not values.get("VCTOOLSINSTALLDIR"):
            why = answer.why or (answer.output.strip().splitlines() or ["it printed nothing"])[-1]
            return faults.vcvars_failed(str(script), why)
        _captured[key] = values
    return _captured[key]


def _has_sdk(values: Mapping[str, str]) -> bool:
    """Whether the C library's headers are among the include folders: they come with the Windows SDK."""
    return any("ucrt" in folder.lower() for folder in values.get("INCLUDE", "").split(";"))


def _needed(before: Mapping[str, str], after: Mapping[str, str], tools: str) -> tuple[tuple[str, str], ...]:
    """What ``cl`` needs beyond ``before``; its own folder comes first on PATH.

    Git, MSYS and Cygwin have a program ``link`` of their own, and their folders can stand before Visual Studio's. The
    messages come in English, so that their first error is found.
    """
    path = [tools, *(f for f in after.get("PATH", "").split(";") if f and f.rstrip("\\") != tools)]
    values = {**after, "PATH": ";".join(path), "VSLANG": "1033"}
    return tuple(sorted((k, v) for k, v in values.items() if _WANTED.fullmatch(k) and before.get(k) != v))


def ask_cl(path: Path, run: Run, machine: str) -> Msvc | Problem:
    """Version and target by the banner of ``cl``: its words and their order depend on the language and come in the
    console's code page; its numbers and the name of the target do not."""
    banner = run([str(path)]).output
    line = (banner.strip().splitlines() or [""])[0]
    version = re.search(r"(?<![\d.])(\d+)\.(\d+)\.(\d+)(?:\.\d+)?(?![\d.])", line)
    if version is None:
        return faults.cl_failed(str(path), line or "it printed nothing")
    word = re.search(r"(?<![A-Za-z0-9])(x64|arm64|80x86|x86|arm)(?![A-Za-z0-9])", line, re.IGNORECASE)
    target = f"{_CL_TARGETS[word[1].lower()] if word else machine}-windows-msvc"
    number = tuple(int(n) for n in version.groups())
    return Msvc(path, number, target, f"msvc {'.'.join(version.groups())} [{target}]", ())


def loaded_dlls(pattern: str) -> tuple[Path, ...]:
    """Paths of the DLLs of this process whose names fit a pattern; ``()`` elsewhere than on Windows."""
    if os.name != "nt":
        return ()
    windll: Any = vars(ctypes)["windll"]
    process = windll.kernel32.GetCurrentProcess()
    handles, needed = (ctypes.c_void_p * 2048)(), ctypes.c_uint32(0)
    listed = windll.psapi.EnumProcessModules(
        ctypes.c_void_p(process), handles, ctypes.sizeof(handles), ctypes.byref(needed)
    )
    found: list[Path] = []
    count = min(needed.value // ctypes.sizeof(ctypes.c_void_p), len(handles)) if listed else 0
    for handle in handles[:count]:
        name = ctypes.create_unicode_buffer(32768)
        if windll.kernel32.GetModuleFileNameW(ctypes.c_void_p(handle), name, len(name)):
            path = Path(name.value)
            if fnmatch.fnmatch(path.name.lower(), pattern):
                found.append(path)
    return tuple(found)
