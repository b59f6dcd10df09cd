"""Library probes (DeepSpeed#2503): one verdict whatever the streams are; "could not test" is not "not found"."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from op_builder.commands import Completed
from op_builder.probes import Verdict, has_function
from op_builder.settings import Settings
from op_builder.toolchain import HostCompiler

GXX = shutil.which("g++")
needs_compiler = pytest.mark.skipif(GXX is None or sys.platform == "win32", reason="g++ is not installed")
COMPILER = HostCompiler("gcc", Path(GXX or "g++"), (12, 2, 0), "x86_64-linux-gnu", "g++", (GXX or "g++",))
ROOT = Path(__file__).resolve().parents[3]


def settings(**env: str) -> Settings:
    return Settings.read({**{k: v for k, v in os.environ.items() if not k.endswith("FLAGS")}, **env})


@needs_compiler
def test_present_and_absent() -> None:
    """Fault: a probe that always says no, or always yes."""
    assert has_function("cos", ["m"], COMPILER, settings()) == Verdict("found")
    missing = has_function("no_such_function", ["m"], COMPILER, settings())
    assert missing.state == "not found" and "no_such_function" in missing.why
    library = has_function("io_submit", ["no_such_library"], COMPILER, settings())
    assert library.state == "not found" and "no_such_library" in library.why


@needs_compiler
@pytest.mark.parametrize("function", ["cos", "no_such_function"])
def test_streams_do_not_matter(function: str) -> None:
    """Fault: stderr a StringIO, None or closed turns the verdict (DeepSpeed#2503)."""
    code = (
        "import io, os, sys\n"
        "from pathlib import Path\n"
        "from op_builder.probes import has_function\n"
        "from op_builder.settings import Settings\n"
        "from op_builder.toolchain import HostCompiler\n"
        f"c = HostCompiler('gcc', Path({GXX!r}), (12,), '', '', ({GXX!r},))\n"
        "s = Settings.read()\n"
        f"ask = lambda: has_function({function!r}, ['m'], c, s).state\n"
        "seen = [ask()]\n"
        "keep = sys.stderr\n"
        "sys.stderr = io.StringIO(); seen.append(ask())\n"
        "sys.stderr = None; seen.append(ask())\n"
        "sys.stderr = keep; sys.stderr.close(); seen.append(ask())\n"
        "os.closerange(0, 3); seen.append(ask())\n"
        "os._exit({('found',) * 5: 10, ('not found',) * 5: 11}.get(tuple(seen), 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == (10 if function == "cos" else 11)
    assert done.stdout == b"" and done.stderr == b""


@needs_compiler
def test_user_flags_count(tmp_path: Path) -> None:
    """Fault: a library in a private prefix given by LDFLAGS or LIBRARY_PATH is not found."""
    source = tmp_path / "p.c"
    source.write_text("int private_call(void) { return 7; }\n", encoding="utf-8")
    out = tmp_path / "a b" / "libprivate.so"
    out.parent.mkdir()
    subprocess.run([str(GXX), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(out)], check=True, timeout=60)
    assert not has_function("private_call", ["private"], COMPILER, settings())
    assert has_function("private_call", ["private"], COMPILER, settings(LDFLAGS=f"'-L{out.parent}'"))
    assert has_function("private_call", ["private"], COMPILER, settings(LIBRARY_PATH=str(out.parent)))


@needs_compiler
@pytest.mark.parametrize("flags", [{"CFLAGS": "-fno-such-flag"}, {"LDFLAGS": "-fuse-ld=none"}])
def test_broken_flags_are_no_verdict(flags: dict[str, str]) -> None:
    """Fault: a broken compiler reads as a missing library, with advice to install it."""
    verdict = has_function("cos", ["m"], COMPILER, settings(**flags))
    assert verdict.state == "could not test" and verdict.why and not verdict


@needs_compiler
def test_temporary_folder(tmp_path: Path) -> None:
    """Fault: TMPDIR that is absent or may not be executed from turns the verdict."""
    shut = tmp_path / "shut"
    shut.mkdir()
    for place in (str(tmp_path / "absent"), str(shut)):
        assert has_function("cos", ["m"], COMPILER, settings(TMPDIR=place)).state == "found"
    assert list(shut.iterdir()) == []


def test_never_runs_the_program() -> None:
    """Fault: the probe runs what it built, which TMPDIR on a noexec mount refuses."""
    seen: list[str] = []

    def run(argv: Sequence[str]) -> Completed:
        seen.append(argv[0])
        return Completed(0)

    assert has_function("cos", ["m"], COMPILER, settings(), run=run).state == "found"
    assert seen == [COMPILER.argv[0]]


@pytest.mark.parametrize(
    ("answers", "state", "word"),
    [
        ([Completed(1, "", "x: undefined reference to `f'"), Completed(0)], "not found", "undefined reference"),
        ([Completed(1, "", "boom"), Completed(1, "", "error: boom")], "could not test", "boom"),
        ([Completed(-1, why="g++ did not answer within 60 s"), Completed(0)], "could not test", "60 s"),
        (
            [Completed(1, "LINK : fatal error LNK1181: cannot open input file 'aio.lib'"), Completed(0)],
            "not found",
            "aio",
        ),
    ],
)
def test_verdicts(answers: list[Completed], state: str, word: str) -> None:
    """Fault: a time-out or a broken linker is taken for an absent library."""
    waiting = list(answers)
    verdict = has_function("f", ["aio"], COMPILER, settings(), run=lambda argv: waiting.pop(0))
    assert verdict.state == state and word in str(verdict)


def test_msvc_command_line() -> None:
    """Fault: gcc's flags given to cl."""
    seen: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> Completed:
        seen.append(argv)
        return Completed(0)

    cl = HostCompiler("msvc", Path("cl.exe"), (19, 40), "x86_64-windows-msvc", "msvc", ("cl.exe",))
    assert has_function("CreateFileW", ["kernel32"], cl, settings(), run=run)
    assert "kernel32.lib" in seen[0] and not any(a.startswith("-l") for a in seen[0])


@pytest.mark.parametrize(("function", "compiler"), [("f", None), ("a b", COMPILER), ("f();", COMPILER)])
def test_what_cannot_be_asked(function: str, compiler: HostCompiler | None) -> None:
    """Fault: no compiler reads as no library; a name is pasted into source unchecked."""
    assert has_function(function, [], compiler, settings()).state == "could not test"
