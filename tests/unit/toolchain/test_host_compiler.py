"""C++ compilers, ninja and TVM-FFI: found where users have them, answered for when they are not usable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from op_builder import toolchain, toolchain_msvc
from op_builder.commands import Completed, Problem
from op_builder.host import HostFacts
from op_builder.matrix import load
from op_builder.settings import Settings
from op_builder.toolchain import (
    FFI,
    discover_host,
    find_ffi,
    find_host_compiler,
    find_ninja,
    parse_compiler_version,
    run_command,
)

LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36))
WINDOWS = HostFacts("windows", "x86_64")
GCC = "{0} (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.\n"
CLANG = "Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu\nThread model: posix\n"
posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake tools are shell scripts")


def tool(folder: Path, name: str, text: str = "", code: int = 0) -> Path:
    """A program that answers anything with ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def find(env: Mapping[str, str], host: HostFacts = LINUX) -> tuple[object, list[Problem]]:
    problems: list[Problem] = []
    settings = Settings.read(env)
    found = find_host_compiler(settings, host, lambda argv: run_command(argv, env={"PATH": os.defpath}), problems)
    return found, problems


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GCC.format("g++"), ("gcc", (12, 2, 0), "")),
        (
            "x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0\nFree Software Foundation",
            ("gcc", (13, 3, 0), ""),
        ),
        ("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-4)\nFree Software Foundation", ("gcc", (8, 5, 0), "")),
        ("c++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0\n\nFree Software Foundation", ("gcc", (11, 4, 0), "")),
        (CLANG, ("clang", (14, 0, 6), "x86_64-pc-linux-gnu")),
        (
            "Apple clang version 15.0.0 (clang-1500.3.9.4)\nTarget: arm64-apple-darwin23.5.0",
            ("clang", (15, 0, 0), "arm64-apple-darwin23.5.0"),
        ),
        ("sh: g++: not found", None),
        ("", None),
    ],
)
def test_versions(text: str, expected: object) -> None:
    """Fault: the distribution's package number, a date or the copyright year taken for the version."""
    assert parse_compiler_version(text) == expected


# --- which compiler -----------------------------------------------------------------------------------------------


@posix
def test_the_usual_compiler_of_path(tmp_path: Path) -> None:
    """Fault: a fixed /usr/bin/g++; clang passed over where g++ is absent."""
    tool(tmp_path, "clang++", CLANG)
    found, problems = find({"PATH": str(tmp_path)})
    assert isinstance(found, toolchain.HostCompiler) and not problems
    assert (found.kind, found.path.name, found.target) == ("clang", "clang++", "x86_64-pc-linux-gnu")
    tool(tmp_path, "g++", GCC.format("g++"))
    found, _ = find({"PATH": str(tmp_path)})
    assert isinstance(found, toolchain.HostCompiler) and found.kind == "gcc" and found.version == (12, 2, 0)


@posix
def test_cxx_with_arguments_quotes_and_blanks(tmp_path: Path) -> None:
    """Fault: CXX="ccache g++ -m64" or a path with a blank is looked up as one file name (pytorch#122476)."""
    place = tmp_path / "a b"
    tool(place, "my-g++", GCC.format("my-g++"))
    found, problems = find({"CXX": f"'{place}/my-g++' -m64", "PATH": "/nonexistent"})
    assert isinstance(found, toolchain.HostCompiler), problems
    assert found.argv == (str(place / "my-g++"), "-m64") and "-m64" in found.identity
    ccache = tool(tmp_path, "ccache", GCC.format("g++"))
    found, _ = find({"CXX": "ccache g++", "PATH": str(tmp_path)})
    assert isinstance(found, toolchain.HostCompiler) and found.argv == (str(ccache), "g++") and found.kind == "gcc"


@posix
@pytest.mark.parametrize(
    ("cc", "name"),
    [("gcc-12", "g++-12"), ("clang", "clang++"), ("x86_64-linux-gnu-gcc", "x86_64-linux-gnu-g++"), ("cc", "c++")],
)
def test_cc_names_its_c_plus_plus_sibling(tmp_path: Path, cc: str, name: str) -> None:
    """Fault: CC honoured for probes only, so that probe and build use different compilers."""
    tool(tmp_path, name, GCC.format(name))
    tool(tmp_path, "g++", "wrong", 1)
    found, problems = find({"CC": cc, "PATH": str(tmp_path)})
    assert isinstance(found, toolchain.HostCompiler), problems
    assert found.path.name == name


@posix
@pytest.mark.parametrize("cxx", ["no-such-compiler", "broken", "silent"])
def test_a_named_compiler_that_fails_is_not_replaced(tmp_path: Path, cxx: str) -> None:
    """Fault: the user's CXX silently ignored; a failing compiler found out in the middle of the build."""
    tool(tmp_path, "g++", GCC.format("g++"))
    tool(tmp_path, "broken", "cannot execute", 1)
    tool(tmp_path, "silent")
    found, problems = find({"CXX": cxx, "PATH": str(tmp_path)})
    assert found is None and len(problems) == 1
    assert cxx in problems[0].what and problems[0].why and problems[0].fix


@posix
def test_a_broken_compiler_on_path_is_passed_over(tmp_path: Path) -> None:
    """Fault: a dead shim hides a working compiler."""
    tool(tmp_path, "g++", "shim: no version set", 126)
    tool(tmp_path, "clang++", CLANG)
    found, problems = find({"PATH": str(tmp_path)})
    assert isinstance(found, toolchain.HostCompiler) and found.kind == "clang"
    assert "g++" in problems[0].what


@posix
def test_too_old(tmp_path: Path) -> None:
    """Fault: pages of template errors instead of one line about the version."""
    tool(tmp_path, "g++", "g++ (GCC) 4.8.5 20150623\nFree Software Foundation")
    found, problems = find({"PATH": str(tmp_path)})
    assert found is None and "4.8.5" in problems[0].what and str(load().host_compilers["gcc"]) in problems[0].why


def test_none(tmp_path: Path) -> None:
    """Fault: "command 'x86_64-linux-gnu-g++' failed" instead of what to install."""
    found, problems = find({"PATH": str(tmp_path)})
    assert found is None and "no C++ compiler" in problems[0].what and problems[0].fix


@posix
def test_the_identity_tells_compilers_apart(tmp_path: Path) -> None:
    """Fault: a part built by another compiler has the same key (pytorch#68905)."""
    tool(tmp_path / "1", "g++", GCC.format("g++"))
    tool(tmp_path / "2", "g++", GCC.format("g++").replace("14+deb12u1", "15"))
    same = tool(tmp_path / "3", "g++", GCC.format("g++"))
    one, two, three = (find({"CXX": str(tmp_path / n / "g++"), "PATH": ""})[0] for n in ("1", "2", "3"))
    assert isinstance(one, toolchain.HostCompiler) and isinstance(two, toolchain.HostCompiler)
    assert isinstance(three, toolchain.HostCompiler) and three.path == same
    assert one.identity != two.identity and one.identity == three.identity


# --- running ------------------------------------------------------------------------------------------------------


def test_run_command_never_raises(tmp_path: Path) -> None:
    """Fault: FileNotFoundError, UnicodeDecodeError or a hang from a tool's answer."""
    assert "cannot run" in run_command([str(tmp_path / "none")]).why
    assert "cannot run" in run_command(["a\0b"]).why
    slow = run_command([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.3)
    assert not slow.ok and "0.3 s" in slow.why
    odd = run_command([sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'\\xff ok')"])
    assert odd.ok and odd.stdout.endswith(" ok")
    waits = run_command(
        [sys.executable, "-c", "print(repr(input()) if False else 'read'); import sys; sys.stdin.read()"]
    )
    assert waits.ok and waits.stdout.strip() == "read"


def test_discover_here_is_lazy() -> None:
    """Fault: looking for a C++ compiler asks CUDA, imports torch or TVM-FFI, or takes seconds."""
    code = (
        "import os, sys, subprocess\n"
        "from op_builder import host, settings, toolchain\n"
        "ran = []\n"
        "real = subprocess.run\n"
        "def run(argv, **k): ran.append(argv); return real(argv, **k)\n"
        "subprocess.run = run\n"
        "found = toolchain.discover_host(settings.Settings.read(), host.HostFacts('linux', 'x86_64'))\n"
        "assert len(ran) <= 2 and all(a[-1] in ('--version', '-dumpmachine') for a in ran), ran\n"
        "assert not found.nvcc and not found.nvrtc\n"
        "assert not {'torch', 'tvm_ffi'} & set(sys.modules)\n"
    )
    if sys.platform != "linux":
        pytest.skip("the test names Linux's tools")
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# --- ninja and TVM-FFI --------------------------------------------------------------------------------------------


def test_ninja() -> None:
    """Fault: the module's ninja is not found in a venv whose bin is not on PATH."""
    pytest.importorskip("ninja")
    found = find_ninja({"PATH": ""})
    assert found is not None and run_command([str(found), "--version"]).ok


def test_ffi_of_this_environment() -> None:
    """Fault: headers found by importing TVM-FFI (which can compile an add-on), or none for the linker."""
    pytest.importorskip("importlib.metadata").version("apache-tvm-ffi")
    system = {"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux")
    found = find_ffi(HostFacts(system, "x86_64"))
    assert isinstance(found, FFI), found
    assert (found.include[0] / "tvm/ffi/c_api.h").is_file() and found.library.is_file()
    assert any((folder / "dlpack/dlpack.h").is_file() for folder in found.include)
    assert found.version.startswith("0.1.")


def package(root: Path, version: str) -> None:
    (root / "tvm_ffi/include/tvm/ffi").mkdir(parents=True)
    (root / "tvm_ffi/include/tvm/ffi/c_api.h").touch()
    (root / "tvm_ffi/lib").mkdir()
    (root / "tvm_ffi/lib/libtvm_ffi.so").touch()
    (root / "tvm_ffi/__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    info = root / f"apache_tvm_ffi-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: {version}\n", encoding="utf-8"
    )


@pytest.mark.parametrize("version", ["0.0.9", "0.2.0", "1.0"])
def test_ffi_out_of_range(tmp_path: Path, version: str) -> None:
    """Fault: built against a TVM-FFI whose ABI is another one."""
    package(tmp_path, version)
    found = find_ffi(LINUX, [str(tmp_path)])
    assert isinstance(found, Problem) and version in found.what and "pip install" in found.fix


def test_ffi_is_not_imported_and_incomplete_is_told(tmp_path: Path) -> None:
    """Fault: the package is run to find its folder; a package without headers fails in the compiler."""
    package(tmp_path, "0.1.15")
    assert isinstance(find_ffi(LINUX, [str(tmp_path)]), FFI)
    (tmp_path / "tvm_ffi/include/tvm/ffi/c_api.h").unlink()
    found = find_ffi(LINUX, [str(tmp_path)])
    assert isinstance(found, Problem) and "c_api.h" in found.why
    missing = find_ffi(LINUX, [str(tmp_path / "empty")])
    assert isinstance(missing, Problem) and "missing" in missing.what


@posix
def test_problems_of_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: only the first missing tool is told."""
    monkeypatch.setattr(toolchain, "find_ninja", lambda env: None)
    monkeypatch.setattr(toolchain, "find_ffi", lambda host: Problem("no ffi", "x", "y"))
    found = discover_host(Settings.read({"PATH": str(tmp_path)}), LINUX)
    assert found.host is None and found.ninja is None and found.ffi is None
    assert len(found.problems) == 3 and all(p.fix for p in found.problems)


# --- Visual Studio ------------------------------------------------------------------------------------------------

PLACE = r"C:\Program Files\Microsoft Visual Studio\2022\BuildTools"
CL = "Microsoft (R) C/C++ Optimizing Compiler Version 19.40.33811 for x64\n"
TOOLS = f"{PLACE}\\VC\\Tools\\MSVC\\14.40\\"
INCLUDE = f"INCLUDE={PLACE}\\include;C:\\SDK\\ucrt"
SET = f"PATH={PLACE}\\bin;C:\\Windows\n{INCLUDE}\nLIB=x\nVCToolsInstallDir={TOOLS}\nHOMEDRIVE=C:\n"


@pytest.fixture(autouse=True)
def nothing_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's answer is kept for a process; each test is a machine of its own."""
    monkeypatch.setattr(toolchain_msvc, "_captured", {})


def windows(answers: Mapping[str, Completed]) -> tuple[list[Sequence[str]], object]:
    seen: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> Completed:
        seen.append(argv)
        return next((a for word, a in answers.items() if word in argv[0]), Completed(-1, why=f"{argv[0]} cannot run"))

    return seen, toolchain_msvc.find_msvc({"PATH": "", "HOMEDRIVE": "C:"}, run, "x86_64")


def test_msvc_by_vswhere() -> None:
    """Fault: a user without a developer prompt is told that there is no compiler; the whole environment copied."""
    answers = {
        "vswhere": Completed(0, json.dumps([{"installationPath": PLACE}])),
        "cmd": Completed(0, SET),
        "cl.exe": Completed(0, "", CL),
    }
    seen, found = windows(answers)
    assert isinstance(found, toolchain_msvc.Msvc)
    assert found.version == (19, 40, 33811) and found.target == "x86_64-windows-msvc"
    assert {"PATH", "INCLUDE", "LIB", "VCTOOLSINSTALLDIR", "VSLANG"} == {k for k, _ in found.env}
    assert any(a.endswith("vcvars64.bat") for a in seen[1])


@pytest.mark.parametrize(
    ("answers", "word"),
    [
        ({}, "vswhere"),
        ({"vswhere": Completed(0, "[]")}, "C++ tools"),
        ({"vswhere": Completed(0, "<html>")}, "unreadable"),
        ({"vswhere": Completed(0, '[{"name": 1}]')}, "unreadable"),
        (
            {
                "vswhere": Completed(0, json.dumps([{"installationPath": PLACE}])),
                "cmd": Completed(1, "", "no such file"),
            },
            "vcvars64",
        ),
        (
            {
                "vswhere": Completed(0, json.dumps([{"installationPath": PLACE}])),
                "cmd": Completed(0, SET),
                "cl.exe": Completed(0, "", "damaged"),
            },
            "cl.exe",
        ),
    ],
)
def test_msvc_missing(answers: Mapping[str, Completed], word: str) -> None:
    """Fault: a traceback for a machine without Visual Studio; no word that prebuilt parts need no compiler."""
    _, found = windows(answers)
    assert isinstance(found, Problem) and word in found.what + found.why and "prebuilt" in found.fix


@pytest.mark.parametrize(
    ("banner", "version", "target"),
    [
        (CL, (19, 40, 33811), "x86_64-windows-msvc"),
        (
            "Microsoft (R) C/C++-Optimierungscompiler Version 19.29.30154 für x64",
            (19, 29, 30154),
            "x86_64-windows-msvc",
        ),
        (
            "Compilateur d'optimisation Microsoft (R) C/C++ version 19.41.34120 pour ARM64",
            (19, 41, 34120),
            "aarch64-windows-msvc",
        ),
    ],
)
def test_cl_in_any_language(banner: str, version: tuple[int, ...], target: str) -> None:
    """Fault: the word "Version ... for" expected in English."""
    found = toolchain_msvc.ask_cl(Path("cl.exe"), lambda argv: Completed(0, "", banner), "x86_64")
    assert isinstance(found, toolchain_msvc.Msvc) and (found.version, found.target) == (version, target)


def test_windows_without_visual_studio() -> None:
    """Fault: Windows is searched for g++."""
    problems: list[Problem] = []
    none = Completed(-1, why="vswhere cannot run")
    assert find_host_compiler(Settings.read({"PATH": ""}), WINDOWS, lambda argv: none, problems) is None
    assert "vswhere" in problems[0].why
