"""Whether a system library offers a function: compile and link four lines, run nothing, look at no stream of Python's.

The verdict has three values. "could not test" is not "not found": a broken compiler or an unwritable temporary folder
says nothing about the library.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .commands import Completed, Run
from .settings import Settings
from .toolchain import HostCompiler, run_command

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Verdict:
    """Outcome of a probe: ``found``, ``not found`` or ``could not test``, and the reason for the latter two."""

    state: Literal["found", "not found", "could not test"]
    why: str = ""

    def __bool__(self) -> bool:
        return self.state == "found"

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


def has_function(
    function: str,
    libraries: Sequence[str],
    compiler: HostCompiler | None,
    settings: Settings,
    *,
    run: Run | None = None,
) -> Verdict:
    """Whether ``function`` links from ``libraries`` with the user's ``CPPFLAGS``, ``CFLAGS``, ``LDFLAGS`` and paths.

    The compiler gets the whole environment, so ``CPATH`` and ``LIBRARY_PATH`` count as they do in a build. The
    program is never run, so a temporary folder without the right to execute is as good as any.

    Args:
        function: name of a C function.
        libraries: names without ``lib`` and suffix.
        compiler: the C++ compiler of host libraries.
        settings: the environment.
        run: runs commands.
    """
    if compiler is None:
        return Verdict("could not test", "no C++ compiler was found")
    if not _IDENTIFIER.fullmatch(function):
        return Verdict("could not test", f"{function!r} is not the name of a C function")
    environment = {**settings.env, **dict(compiler.env), "LC_ALL": "C"}
    execute: Run = run or (lambda argv: run_command(argv, env=environment, timeout_s=60.0))
    try:
        with tempfile.TemporaryDirectory(dir=_scratch(settings), prefix="ds-probe-") as folder:
            linked = _link(Path(folder), _calling(function), libraries, compiler, settings, execute)
            if linked.ok:
                return Verdict("found")
            # The same flags with an empty program: does anything link here?
            control = _link(Path(folder), "int main() { return 0; }\n", (), compiler, settings, execute)
    except OSError as exc:
        return Verdict("could not test", f"no temporary folder can be written: {exc}")
    if not control.ok:
        return Verdict("could not test", _reason(control))
    if linked.why:
        return Verdict("could not test", linked.why)
    return Verdict("not found", _reason(linked))


def _scratch(settings: Settings) -> str | None:
    # One that cannot be written is no verdict: Python's own choice is as good, since nothing is run.
    named = settings.env.get("TMPDIR", "")
    return named if named and os.access(named, os.W_OK | os.X_OK) else None


def _calling(function: str) -> str:
    # Its address escapes through a volatile, so that no optimisation removes the reference.
    return (
        f'extern "C" char {function}(void);\n'
        f"char (*volatile keep)(void) = {function};\n"
        "int main() { return !keep; }\n"
    )


def _link(
    folder: Path, text: str, libraries: Sequence[str], compiler: HostCompiler, settings: Settings, run: Run
) -> Completed:
    source = folder / "probe.cpp"
    source.write_text(text, encoding="utf-8")
    prefix = compiler.argv or (str(compiler.path),)
    flags = (*settings.cppflags, *settings.cflags)
    if compiler.takes_msvc_flags:
        out, objects = f"/Fe{folder / 'probe.exe'}", f"/Fo{folder / 'probe.obj'}"
        names = [f"{name}.lib" for name in libraries]
        return run([*prefix, "/nologo", *flags, str(source), out, objects, *names, "/link", *settings.ldflags])
    # -fno-builtin: the function can be one that the compiler knows with another signature.
    quiet = ("-w", "-fno-builtin", "-o", str(folder / "probe"))
    return run([*prefix, *flags, *quiet, str(source), *settings.ldflags, *(f"-l{name}" for name in libraries)])


def _reason(done: Completed) -> str:
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    telling = re.compile(r"undefined reference|undefined symbol|cannot find|cannot open|error|not found", re.IGNORECASE)
    return done.why or next(
        (ln for ln in lines if telling.search(ln)), lines[-1] if lines else f"exit {done.returncode}"
    )
