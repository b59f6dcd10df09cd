"""The command lines of a host part, and the ``build.ninja`` that runs them: text from a plan, nothing is run here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CompileFailed, CompilerMissing
from .plan import PartPlan
from .toolchain import HostCompiler


@dataclass(frozen=True)
class Step:
    """One command of a host part: what it runs, what it makes (relative to the scratch folder), of what."""

    argv: tuple[str, ...]
    output: str
    inputs: tuple[str, ...]
    text: str


def host_steps(part: PartPlan, out: Path) -> tuple[Step, ...]:
    """The commands of a host part, one per source and one that links.

    Object names carry the source's place in the list, so that no two sources can share one.
    """
    if not isinstance(part.compiler, HostCompiler) or part.ffi is None:
        raise CompilerMissing(f"{part.op} {part.variant} has no host compiler", "the plan holds none")
    msvc = part.compiler.takes_msvc_flags
    compile_one, link = (_msvc_compile, _msvc_link) if msvc else (_gnu_compile, _gnu_link)
    steps, objects = [], []
    for number, source in enumerate(part.sources):
        stem = re.sub(r"[^A-Za-z0-9]+", "_", source.rel)
        objects.append(f"o/{number}_{stem}.o")
        argv = compile_one(part, str(source.path), objects[-1])
        steps.append(Step(argv, objects[-1], (str(source.path),), f"{part.op}: compile {source.rel}"))
    argv = link(part, objects, str(out))
    steps.append(Step(argv, str(out), tuple(objects), f"{part.op}: link {part.filename}"))
    return tuple(steps)


def _command(part: PartPlan) -> tuple[str, ...]:
    assert isinstance(part.compiler, HostCompiler)
    return part.compiler.argv or (str(part.compiler.path),)


def _gnu_compile(part: PartPlan, source: str, target: str) -> tuple[str, ...]:
    assert part.ffi is not None
    # What __FILE__ says must not depend on where files lie: equal sources give equal bytes.
    mapped = [f"-ffile-prefix-map={part.csrc}=csrc", *(f"-ffile-prefix-map={f}=tvm_ffi" for f in part.ffi.include)]
    places = (*mapped, f"-I{part.csrc}")
    system = [word for folder in part.ffi.include for word in ("-isystem", str(folder))]
    return (*_command(part), *part.compile_flags, *places, *system, *part.user_flags, "-c", source, "-o", target)


def _gnu_link(part: PartPlan, objects: Sequence[str], out: str) -> tuple[str, ...]:
    assert part.ffi is not None
    # No RUNPATH to it: tvm_ffi is imported first, and the loader then finds the library by its name.
    mingw = isinstance(part.compiler, HostCompiler) and part.compiler.kind == "mingw"
    libraries = (str(part.ffi.library),) if mingw else (f"-L{part.ffi.lib}", "-ltvm_ffi")
    return (*_command(part), *part.link_flags, *objects, "-o", out, *libraries, *part.user_link_flags)


def _msvc_compile(part: PartPlan, source: str, target: str) -> tuple[str, ...]:
    assert part.ffi is not None
    places = (f"/I{part.csrc}", *(f"/I{folder}" for folder in part.ffi.include))
    return (*_command(part), *part.compile_flags, *places, *part.user_flags, "/c", source, f"/Fo{target}")


def _msvc_link(part: PartPlan, objects: Sequence[str], out: str) -> tuple[str, ...]:
    assert part.ffi is not None
    own = ("/link", "/INCREMENTAL:NO", f"/LIBPATH:{part.ffi.lib}", "tvm_ffi.lib", "/IMPLIB:o/unused.lib")
    return (*_command(part), *part.link_flags, *objects, f"/Fe{out}", *own, *part.user_link_flags)


def ninja_text(steps: Sequence[Step], windows: bool = sys.platform == "win32") -> str:
    """The ``build.ninja`` of these steps; survives blanks, ``$``, ``:`` and quotes in every path."""
    lines = ["ninja_required_version = 1.5", "rule run", "  command = $cmd", "  description = $text", ""]
    for step in steps:
        command = subprocess.list2cmdline(step.argv) if windows else shlex.join(step.argv)
        if "\n" in command or "\n" in step.output:
            raise CompileFailed("a path holds a line break", repr(command), "move the checkout or the store")
        inputs = " ".join(_ninja_path(i) for i in step.inputs)
        lines += [f"build {_ninja_path(step.output)}: run {inputs}", f"  cmd = {_ninja_value(command)}"]
        lines += [f"  text = {_ninja_value(step.text)}", ""]
    return "\n".join(lines)


def _ninja_value(text: str) -> str:
    return text.replace("$", "$$")


def _ninja_path(text: str) -> str:
    return _ninja_value(text).replace(" ", "$ ").replace(":", "$:")
