"""Visual Studio, clang-cl, mingw, Cygwin and nvcc's host compiler on recorded Windows machines."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from op_builder import cuda_toolkits, matrix, toolchain_msvc
from op_builder.choose import compiler_name
from op_builder.commands import Completed, Problem
from op_builder.host import HostFacts
from op_builder.ninja_file import host_steps, ninja_text
from op_builder.nvcc_host import host_of_nvcc, unfit_for_nvcc
from op_builder.plan import host_flags, plan_host
from op_builder.settings import Settings
from op_builder.toolchain import FFI, HostCompiler, Kind, Toolchain, find_host_compiler
from op_builder.toolchain_msvc import Msvc, ask_cl, find_msvc
from tests.toys import toy_home, toy_spec
from tests.unit.windows.recorded import CL, ENGLISH, PLACE, TOOLS, WindowsMachine, variables

ROOT = Path(__file__).resolve().parents[3]
WINDOWS = HostFacts("windows", "x86_64")
LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36))
FFI_WINDOWS = FFI(
    (Path("C:/py/tvm_ffi/include"),), Path("C:/py/tvm_ffi/lib"), Path("C:/py/tvm_ffi/lib/tvm_ffi.lib"), "0.1.9"
)


def find(env: Mapping[str, str], machine: WindowsMachine, host: HostFacts = WINDOWS) -> HostCompiler | Problem:
    """The host compiler, or the first reason why there is none."""
    problems: list[Problem] = []
    found = find_host_compiler(Settings.read(env), host, machine.run, problems)
    return found or problems[0]


# --- Visual Studio ------------------------------------------------------------------------------------------------


def test_build_tools_without_a_prompt_an_administrator_or_the_registry() -> None:
    """Fault: "run this from the x64 Native Tools prompt"; DISTUTILS_USE_SDK; build_win.bat."""
    found = find({"PATH": r"C:\Windows"}, WindowsMachine.with_visual_studio())
    assert isinstance(found, HostCompiler), found
    assert (found.kind, found.version, str(found.path)) == ("msvc", (19, 44, 35211), CL)
    assert compiler_name(found) == "cl 19.44.35211"
    env = dict(found.env)
    assert env["INCLUDE"].startswith(TOOLS) and env["LIB"] and env["VSLANG"] == "1033"
    assert "ALLUSERSPROFILE" not in env, "only what compiling needs"


def test_nothing_asks_the_registry() -> None:
    """Fault: an installation that the registry does not know (portable, copied, a container) is not found."""
    for path in (ROOT / "op_builder").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not names & {"winreg", "_winreg"}, path


@pytest.mark.parametrize("place", [PLACE, r"D:\Werkzeuge für C++\Visual Studio", r"D:\工具\VS 2022", r"E:\VS"])
def test_folders_with_blanks_and_any_script(place: str) -> None:
    """Fault: a folder with a blank or a letter beyond ASCII is cut or garbled on its way through cmd and vswhere."""
    machine = WindowsMachine.with_visual_studio(place)
    found = find({"PATH": ""}, machine)
    assert isinstance(found, HostCompiler) and str(found.path).startswith(place)
    script = next(argv for argv in machine.ran if argv[0] == "cmd")
    assert place + r"\VC\Auxiliary\Build\vcvars64.bat" in script, "one argument, quoted by whoever starts cmd"
    assert "65001" in script and "-utf8" in machine.ran[0]


@pytest.mark.parametrize(
    ("banner", "page", "version", "target"),
    [
        ("用于 x64 的 Microsoft (R) C/C++ 优化编译器 19.29.30133 版", "cp936", (19, 29, 30133), "x86_64"),
        ("用于 x86 的 Microsoft (R) C/C++ 优化编译器 19.44.35211 版", "cp936", (19, 44, 35211), "i386"),
        ("Microsoft(R) C/C++ Optimizing Compiler Version 19.29.30133 for x64", "cp932", (19, 29, 30133), "x86_64"),
        ("Microsoft (R) C/C++ 최적화 컴파일러 버전 19.39.33523(x64)", "cp949", (19, 39, 33523), "x86_64"),
        ("Microsoft (R) C/C++-Optimierungscompiler Version 19.29.30154 für x64", "cp850", (19, 29, 30154), "x86_64"),
        (
            "Оптимизирующий компилятор Microsoft (R) C/C++ версии 19.43.34810 для x64",
            "cp866",
            (19, 43, 34810),
            "x86_64",
        ),
        (
            "Compilateur d'optimisation Microsoft (R) C/C++ version 19.41.34120 pour ARM64",
            "cp850",
            (19, 41, 34120),
            "aarch64",
        ),
        (ENGLISH, "utf-8", (19, 44, 35211), "x86_64"),
    ],
)
def test_banners_in_every_code_page(banner: str, page: str, version: tuple[int, ...], target: str) -> None:
    """Fault: UnicodeDecodeError: 'gbk' codec; the last word of the banner taken for the target."""
    found = ask_cl(Path("cl.exe"), WindowsMachine(banner=banner.encode(page)).run, "x86_64")
    assert isinstance(found, Msvc) and (found.version, found.target) == (version, f"{target}-windows-msvc")


@pytest.mark.parametrize(
    ("machine", "what"),
    [
        (WindowsMachine(), "no C++ compiler was found"),
        (WindowsMachine(vswhere=""), "no C++ tools"),
        (WindowsMachine(vswhere="[]"), "no C++ tools"),
        (WindowsMachine(vswhere="not JSON"), "unreadable answer"),
        (WindowsMachine(vswhere=json.dumps([{"installationPath": PLACE}])), "vcvars64.bat does not work"),
        (WindowsMachine(vswhere=json.dumps([{"installationPath": PLACE}]), script="Path=x\r\n"), "vcvars64.bat"),
        (WindowsMachine(vswhere=json.dumps([{"installationPath": PLACE}]), script=variables()), "cl.exe does not work"),
        (WindowsMachine.with_visual_studio(sdk=False), "the Windows SDK is missing"),
        (WindowsMachine.with_visual_studio(banner=b""), "cl.exe does not work"),
    ],
)
def test_what_is_absent_is_said(machine: WindowsMachine, what: str) -> None:
    """Fault: a traceback, or a compiler error half an hour later, for a piece of Visual Studio that is not there."""
    found = find({"PATH": ""}, machine)
    assert isinstance(found, Problem) and what in found.what and found.why and "prebuilt" in found.fix


def test_program_files_on_another_drive() -> None:
    """Fault: os.environ's names are in capitals on Windows, and "ProgramFiles(x86)" is never found."""
    for name in ("PROGRAMFILES(X86)", "ProgramFiles(x86)"):
        machine = WindowsMachine.with_visual_studio()
        find_msvc({"PATH": "", name: r"D:\Programme (x86)"}, machine.run, "x86_64")
        assert machine.ran[0][0].startswith(r"D:\Programme (x86)\Microsoft Visual Studio\Installer")


def test_the_environment_has_each_variable_once() -> None:
    """Fault: "Path" beside "PATH" in a child's environment; which of the two counts is chance."""
    found = find({"PATH": "x"}, WindowsMachine.with_visual_studio())
    assert isinstance(found, HostCompiler)
    assert all(name == name.upper() for name, _ in found.env)


def test_the_own_folder_of_cl_comes_first() -> None:
    """Fault: Git's, MSYS's or Cygwin's `link` is run instead of the linker (extra operand ...)."""
    script = variables().replace("Path=", r"Path=C:\Program Files\Git\usr\bin;C:\cygwin64\bin;")
    machine = WindowsMachine(json.dumps([{"installationPath": PLACE}]), script, ENGLISH.encode())
    found = find({"PATH": ""}, machine)
    assert isinstance(found, HostCompiler)
    folders = dict(found.env)["PATH"].split(";")
    assert folders[0] == TOOLS + r"\bin\Hostx64\x64" and folders.count(folders[0]) == 1
    assert r"C:\Program Files\Git\usr\bin" in folders[1:]


def test_the_script_runs_once_for_all_ops() -> None:
    """Fault: three seconds of vcvars64.bat for every op that is built."""
    machine = WindowsMachine.with_visual_studio()
    first, second = find({"PATH": "a"}, machine), find({"PATH": "a"}, machine)
    assert first == second and sum(argv[0] == "cmd" for argv in machine.ran) == 1
    failing = WindowsMachine(json.dumps([{"installationPath": "D:\\other"}]))
    find({"PATH": "a"}, failing)
    find({"PATH": "a"}, failing)
    assert sum(argv[0] == "cmd" for argv in failing.ran) == 2, "a failure is not remembered"


def prompt(tmp_path: Path, **extra: str) -> dict[str, str]:
    """The environment of a developer prompt whose ``cl`` lies in ``tmp_path``."""
    (tmp_path / "cl").write_text("", encoding="utf-8")
    (tmp_path / "cl").chmod(0o755)
    return {"PATH": str(tmp_path), "INCLUDE": r"C:\VC\include;C:\Kits\ucrt", **extra}


def test_a_developer_prompt_for_this_machine(tmp_path: Path) -> None:
    """Fault: the prompt the user chose is left aside, or its script is run again."""
    machine = WindowsMachine(banner=ENGLISH.encode())
    found = find(prompt(tmp_path), machine)
    assert isinstance(found, HostCompiler) and found.path == tmp_path / "cl"
    assert len(machine.ran) == 1


def test_a_developer_prompt_for_x86_around_a_64_bit_python(tmp_path: Path) -> None:
    """Fault: LNK1112: the plain "Developer Command Prompt" compiles for x86, and Python is 64-bit."""
    x86 = ENGLISH.replace("x64", "x86").encode()
    alone = find(prompt(tmp_path), WindowsMachine(banner=x86))
    assert isinstance(alone, Problem) and "compiles for i386" in alone.what and "x86_64" in alone.why
    both = WindowsMachine.with_visual_studio()

    def run(argv: list[str]) -> Completed:
        return Completed(0, "", x86.decode()) if argv[0] == str(tmp_path / "cl") else both.run(argv)

    found = find_msvc(prompt(tmp_path), run, "x86_64")  # type: ignore[arg-type]
    assert isinstance(found, Msvc) and str(found.path) == CL


def test_a_prompt_without_the_sdk(tmp_path: Path) -> None:
    """Fault: corecrt.h not found, in the middle of the build."""
    found = find({**prompt(tmp_path), "INCLUDE": r"C:\VC\include"}, WindowsMachine(banner=ENGLISH.encode()))
    assert isinstance(found, Problem) and "Windows SDK" in found.what


def test_arm64() -> None:
    """Fault: the x64 script and folders on an ARM64 machine."""
    banner = ENGLISH.replace("x64", "ARM64").encode()
    machine = WindowsMachine.with_visual_studio(banner=banner)
    found = find({"PATH": ""}, machine, HostFacts("windows", "aarch64"))
    assert isinstance(found, HostCompiler) and found.target == "aarch64-windows-msvc"
    assert r"Hostarm64\arm64" in str(found.path) and "VC.Tools.ARM64" in " ".join(machine.ran[0])
    assert any(a.endswith("vcvarsarm64.bat") for a in machine.ran[1])


@pytest.mark.parametrize(("version", "fits"), [("19.20.27508", True), ("19.16.27054", False), ("19.52.36000", True)])
def test_too_old_for_cpp17(version: str, fits: bool) -> None:
    """Fault: pages of template errors of Visual Studio 2017."""
    machine = WindowsMachine.with_visual_studio(banner=f"Microsoft C/C++ Version {version} for x64".encode())
    found = find({"PATH": ""}, machine)
    assert isinstance(found, HostCompiler) is fits
    assert fits or (isinstance(found, Problem) and version in found.what)


# --- other compilers ----------------------------------------------------------------------------------------------

CLANG_CL = "clang version 17.0.6\nTarget: x86_64-pc-windows-msvc\nThread model: posix\n"
MINGW = "x86_64-w64-mingw32-g++ (GCC) 12-posix\nCopyright (C) 2022 Free Software Foundation, Inc.\n"
APPLE = "Apple clang version 15.0.0\nTarget: arm64-apple-darwin23"
CYGWIN = "g++ (GCC) 12.4.0\nCopyright (C) 2022 Free Software Foundation, Inc.\n"
GCC = "g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.\n"


def named(tmp_path: Path, name: str, version: str, target: str, host: HostFacts) -> HostCompiler | Problem:
    """What becomes of ``CXX=name`` that answers so."""
    program = tmp_path / name
    program.write_text("", encoding="utf-8")
    program.chmod(0o755)
    problems: list[Problem] = []

    def run(argv: list[str]) -> Completed:
        return Completed(0, version if argv[-1] == "--version" else target + "\n")

    found = find_host_compiler(Settings.read({"CXX": str(program), "PATH": ""}), host, run, problems)  # type: ignore[arg-type]
    return found or problems[0]


@pytest.mark.parametrize(
    ("name", "version", "target", "host", "kind"),
    [
        ("clang-cl.exe", CLANG_CL, "", WINDOWS, "clang-cl"),
        ("clang-cl", CLANG_CL, "", WINDOWS, "clang-cl"),
        ("x86_64-w64-mingw32-g++", MINGW, "x86_64-w64-mingw32", WINDOWS, "mingw"),
        ("g++", GCC, "x86_64-linux-gnu", LINUX, "gcc"),
        ("g++", GCC, "x86_64-alpine-linux-musl", HostFacts("linux", "x86_64", "musl"), "gcc"),
        (
            "clang++",
            APPLE,
            "",
            HostFacts("macos", "aarch64"),
            "clang",
        ),
    ],
)
def test_compilers_of_this_system(
    tmp_path: Path, name: str, version: str, target: str, host: HostFacts, kind: str
) -> None:
    """Fault: clang-cl given GNU flags, mingw given MSVC's."""
    found = named(tmp_path, name, version, target, host)
    assert isinstance(found, HostCompiler) and found.kind == kind, found
    assert found.takes_msvc_flags is (kind == "clang-cl")
    assert found.family == {"clang-cl": "clang", "mingw": "gcc"}.get(kind, kind)


@pytest.mark.parametrize(
    ("name", "version", "target", "host", "word"),
    [
        ("g++", CYGWIN, "x86_64-pc-cygwin", WINDOWS, "Visual Studio is found without it"),
        ("g++", CYGWIN, "x86_64-pc-msys", WINDOWS, "Visual Studio is found without it"),
        ("clang++", CLANG_CL, "", WINDOWS, "CXX=clang-cl"),
        ("x86_64-w64-mingw32-g++", MINGW, "x86_64-w64-mingw32", LINUX, "this system's compiler"),
        ("g++", GCC, "x86_64-linux-gnu", HostFacts("macos", "aarch64"), "this system's compiler"),
    ],
)
def test_compilers_of_another_system(
    tmp_path: Path, name: str, version: str, target: str, host: HostFacts, word: str
) -> None:
    """Fault: a library that no Python here loads is built, published and found out when it is loaded."""
    found = named(tmp_path, name, version, target, host)
    assert isinstance(found, Problem) and word in found.fix


# --- nvcc's host compiler -----------------------------------------------------------------------------------------


def msvc(version: tuple[int, ...]) -> HostCompiler:
    return HostCompiler("msvc", Path("cl.exe"), version, "x86_64-windows-msvc", "msvc", ("cl.exe",))


@pytest.mark.parametrize("release", sorted(matrix.load().cuda))
def test_msvc_against_every_cuda_of_the_matrix(release: tuple[int, int]) -> None:
    """Fault: "unsupported Microsoft Visual Studio version!" from the middle of a header."""
    allowed = matrix.load().cuda[release].msvc
    assert allowed.below is not None
    assert unfit_for_nvcc(msvc(allowed.low), release) is None
    assert unfit_for_nvcc(msvc((allowed.below[0], allowed.below[1] - 1, 99999)), release) is None
    old, new = unfit_for_nvcc(msvc((19, 0, 24215)), release), unfit_for_nvcc(msvc(allowed.below), release)
    assert old is not None and "too old" in old.what and matrix.dotted(release) in old.what
    assert new is not None and "too new" in new.what and "NVRTC" in new.fix


def test_a_cuda_the_matrix_does_not_list() -> None:
    """Fault: KeyError for a release of next month, or for one between two listed ones."""
    assert unfit_for_nvcc(msvc((19, 40)), (99, 0)) is None
    assert unfit_for_nvcc(msvc((19, 40)), (12, 2)) is not None, "counts as the newest listed below it, 12.1"
    assert unfit_for_nvcc(msvc((19, 40)), (11, 8)) is None, "older than all: nvcc's own word counts"


def test_what_nvcc_is_given() -> None:
    """Fault: nvcc without cl on PATH: "Cannot find compiler 'cl.exe' in PATH"."""
    settings = Settings.read({"PATH": ""})
    assert host_of_nvcc(settings, LINUX, (13, 0)) is None, "it finds the system's own"
    found = host_of_nvcc(settings, WINDOWS, (13, 0), WindowsMachine.with_visual_studio().run)
    assert isinstance(found, HostCompiler) and dict(found.env)["PATH"].startswith(TOOLS)
    none = host_of_nvcc(settings, WINDOWS, (13, 0), WindowsMachine().run)
    assert isinstance(none, Problem) and "no C++ compiler" in none.what
    old = host_of_nvcc(settings, WINDOWS, (12, 1), WindowsMachine.with_visual_studio().run)
    assert isinstance(old, Problem) and "too new" in old.what


def test_toolkits_where_the_installer_puts_them(tmp_path: Path) -> None:
    """Fault: CUDA is installed, CUDA_PATH is not set in this shell, and "no compiler" is said."""
    base = tmp_path / "NVIDIA GPU Computing Toolkit" / "CUDA"
    for name in ("v12.1", "v12.10", "v9.2"):
        (base / name).mkdir(parents=True)
    found = cuda_toolkits.windows_toolkits({"PROGRAMFILES": str(tmp_path)})
    assert [p.name for p in found] == ["v12.10", "v12.1", "v9.2"]
    assert cuda_toolkits.windows_toolkits({}) == () and cuda_toolkits.windows_toolkits({"PROGRAMFILES": "Z:/x"}) == ()
    (base / "v12.10" / "bin" / "x64").mkdir(parents=True)
    for name in ("nvrtc64_120_0.dll", "nvrtc-builtins64_1210.dll"):
        (base / "v12.10" / "bin" / "x64" / name).touch()
    folders = cuda_toolkits.nvrtc_folders({"PROGRAMFILES": str(tmp_path)}, [], [], None, tmp_path)
    assert base / "v12.10" / "bin" / "x64" in [folder for folder, _ in folders]


# --- command lines ------------------------------------------------------------------------------------------------


def plan(tmp_path: Path, kind: Kind) -> tuple[str, str]:
    """Compile and link command of the toy op on Windows."""
    home = toy_home(tmp_path / "mein Häuschen 家")
    compiler = HostCompiler(kind, Path("C:/t/cxx.exe"), (19, 40), "x86_64-windows-msvc", kind, ("C:/t/cxx.exe",))
    tools = Toolchain(compiler, Path("ninja"), ffi=FFI_WINDOWS)
    part = plan_host(toy_spec(), tools, Settings.read({}), WINDOWS, home / "csrc", "1")
    assert part.filename == "toy.windows-x86_64.dll" and part.variant == "windows-x86_64"
    steps = host_steps(part, Path("C:/mein Ort/toy.windows-x86_64.dll"))
    text = ninja_text(steps, windows=True)
    assert text.encode("utf-8").decode("utf-8") == text and '"' in text
    return " ".join(steps[0].argv), " ".join(steps[-1].argv)


def test_msvc_command_lines(tmp_path: Path) -> None:
    """Fault: /fp:fast, no /utf-8 (warning C4819 in cp936), a contraction that changes bits."""
    compiling, linking = plan(tmp_path, "msvc")
    for flag in ("/utf-8", "/fp:precise", "/std:c++17", "/EHsc", "/MD"):
        assert flag in compiling.split()
    assert "-f" not in compiling and "tvm_ffi.lib" in linking and "/LIBPATH:C:/py/tvm_ffi/lib" in linking


def test_clang_cl_command_lines(tmp_path: Path) -> None:
    """Fault: clang-cl's /fp:precise contracts a * b + c, and other bits come out than everywhere else."""
    compiling, linking = plan(tmp_path, "clang-cl")
    assert "/clang:-ffp-contract=off" in compiling and "/utf-8" in compiling and "tvm_ffi.lib" in linking
    assert "/clang:-ffp-contract=off" not in host_flags("msvc", "windows")[0]


def test_mingw_command_lines(tmp_path: Path) -> None:
    """Fault: 32-byte moves on a stack that Windows aligns to 16; libstdc++-6.dll wanted on the user's machine."""
    compiling, linking = plan(tmp_path, "mingw")
    assert "-Wa,-muse-unaligned-vector-move" in compiling and "-ffp-contract=off" in compiling
    assert "-fPIC" not in compiling and "-fvisibility=hidden" not in compiling
    assert "-static" in linking.split() and "C:/py/tvm_ffi/lib/tvm_ffi.lib" in linking and "-z," not in linking


def test_the_script_answer_is_not_shared_between_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: what one PATH gave is kept for another."""
    monkeypatch.setattr(toolchain_msvc, "_captured", {})
    machine = WindowsMachine.with_visual_studio()
    find({"PATH": "a"}, machine)
    find({"PATH": "b"}, machine)
    assert sum(argv[0] == "cmd" for argv in machine.ran) == 2
