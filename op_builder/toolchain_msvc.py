"""Visual Studio's compiler on Windows: through PATH (a developer prompt), else through vswhere and vcvarsall."""

from __future__ import annotations

import ctypes
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from .commands import Problem, Run

_COMPONENT = {
    "x86_64": "Microsoft.VisualStudio.Component.VC.Tools.x86.x64",
    "aarch64": "Microsoft.VisualStudio.Component.VC.Tools.ARM64",
}
_VCVARS = {"x86_64": "x64", "aarch64": "arm64"}
_CL_TARGETS = {"x64": "x86_64", "arm64": "aarch64", "x86": "i386", "80x86": "i386"}
_FIX = "install the Visual Studio Build Tools with the C++ workload, or use the prebuilt parts: they need no compiler"
# What vcvarsall changes for other reasons than compiling; PATH, INCLUDE, LIB and the tools' own folders matter.
_WANTED = re.compile(r"PATH|INCLUDE|LIB|LIBPATH|(VC|VS|WindowsSdk|WindowsLib|UCRT|UniversalCRT)\w*", re.IGNORECASE)


@dataclass(frozen=True)
class Msvc:
    """One ``cl``: program, version, target (``x86_64-windows-msvc``), identity, variables it needs."""

    path: Path
    version: tuple[int, ...]
    target: str
    identity: str
    env: tuple[tuple[str, str], ...]


def find_msvc(env: Mapping[str, str], run: Run, machine: str) -> Msvc | Problem:
    """The ``cl`` of this prompt, else of the newest Visual Studio."""
    on_path = shutil.which("cl", path=env.get("PATH", env.get("Path", "")))
    if on_path and env.get("INCLUDE"):
        return ask_cl(Path(on_path), run, machine)
    programs = env.get("ProgramFiles(x86)") or env.get("ProgramFiles") or "C:\\Program Files (x86)"
    vswhere = PureWindowsPath(programs) / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    component = _COMPONENT.get(machine, _COMPONENT["x86_64"])
    answer = run(
        [str(vswhere), "-products", "*", "-requires", component, "-latest", "-format", "json", "-utf8", "-nologo"]
    )
    if not answer.ok:
        return Problem("no C++ compiler was found", f"cl is not on PATH and {answer.why or vswhere} failed", _FIX)
    try:
        places = [str(found["installationPath"]) for found in json.loads(answer.stdout or "[]")]
    except (ValueError, KeyError, TypeError) as exc:
        return Problem("vswhere gave an unreadable answer", f"{type(exc).__name__}: {exc}", _FIX)
    if not places:
        return Problem("Visual Studio has no C++ tools", f"vswhere finds none with {component}", _FIX)
    return _activate(PureWindowsPath(places[0]), env, run, machine)


def _activate(place: PureWindowsPath, env: Mapping[str, str], run: Run, machine: str) -> Msvc | Problem:
    script = place / "VC" / "Auxiliary" / "Build" / "vcvarsall.bat"
    kind = _VCVARS.get(machine, "x64")
    # Code page 65001 makes the output UTF-8; `set` prints what the script made of the environment.
    answer = run(["cmd", "/d", "/c", "chcp", "65001", ">nul", "&&", "call", str(script), kind, ">nul", "&&", "set"])
    values = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
    folder = values.get("VCToolsInstallDir", "")
    if not answer.ok or not folder:
        why = answer.why or (answer.output.strip().splitlines() or ["it printed nothing"])[-1]
        return Problem(f"{script} {kind} does not work", why, _FIX)
    changed = {k: v for k, v in values.items() if _WANTED.fullmatch(k) and env.get(k) != v}
    cl = PureWindowsPath(folder) / "bin" / f"Host{kind}" / kind / "cl.exe"
    found = ask_cl(Path(str(cl)), run, machine)
    if isinstance(found, Problem):
        return found
    return Msvc(found.path, found.version, found.target, found.identity, tuple(sorted(changed.items())))


def ask_cl(path: Path, run: Run, machine: str) -> Msvc | Problem:
    """Version and target by the banner of ``cl`` (its words depend on the language, its numbers do not)."""
    banner = run([str(path)]).output
    line = (banner.strip().splitlines() or [""])[0]
    version = re.search(r"\b(\d+)\.(\d+)\.(\d+)(?:\.\d+)?\b", line)
    if version is None:
        return Problem(f"{path} does not work", line or "it printed nothing", _FIX)
    word = line.split()[-1].lower()
    target = f"{_CL_TARGETS.get(word, machine)}-windows-msvc"
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
