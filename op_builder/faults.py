"""What goes wrong on machines unlike the usual one: each fault is a function of plain values to what, why and fix.

Whoever finds a fault calls its function, and the tables of ``docs/windows.md`` are written from :data:`CATALOGUE`: what
the documentation says and what a user reads cannot differ. No function here looks at anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .commands import Problem
from .errors import CompilerMissing, DriverError, HostUnsupported, LoadFailed, NoMatchingPart, OpsError, StoreError

# The longest path that programs without a manifest of their own get through: MAX_PATH less the final zero.
LONGEST_PATH = 259


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


# --- Python -------------------------------------------------------------------------------------------------------


def python_is_32_bit(platform: str, newest: tuple[int, int]) -> Problem:
    """A 32-bit process on a 64-bit system, whose libraries it cannot load."""
    why = f"op libraries are 64-bit ({platform}), and a 32-bit process loads none; torch has no 32-bit wheel either"
    fix = f"winget install --architecture x64 Python.Python.{_dotted(newest)}"
    return Problem(
        "this Python is a 32-bit program", why, fix if platform.startswith("windows") else "use a 64-bit Python"
    )


def python_is_untested(found: tuple[int, int], newest: tuple[int, int]) -> Problem:
    """A Python released after this package."""
    why = f"this release was tested up to Python {_dotted(newest)}; its parts hold no Python code, so most will work"
    fix = f"if something fails: use Python {_dotted(newest)}, or pip install --upgrade deepspeed"
    return Problem(f"Python {_dotted(found)} is newer than tested", why, fix)


def ffi_of_another_python(found: Iterable[str], wanted: str) -> Problem:
    """apache-tvm-ffi was installed for another Python (a copied or shared site-packages)."""
    why = f"it holds {', '.join(found) or 'no core module'}; this Python loads core{wanted}"
    return Problem(
        "apache-tvm-ffi was installed for another Python", why, "pip install --force-reinstall apache-tvm-ffi"
    )


# --- parts --------------------------------------------------------------------------------------------------------


def part_of_another_platform(found: str, here: str) -> Problem:
    """A wheel's host part for another system or CPU."""
    fix = "pip install --force-reinstall --no-cache-dir deepspeed, with the pip of this Python"
    return Problem("the part is of another platform", f"made for {found}, this is {here}", fix)


def part_on_noexec_mount(path: str, why: str) -> Problem:
    """A library on a mount without the right to execute: no fault of the part."""
    fix = "remount it with exec, or move the part (DS_OPS_PATH, TORCH_EXTENSIONS_DIR)"
    return Problem(f"{path} does not load: its mount is noexec", why, fix)


def path_is_too_long(path: str, length: int | None = None) -> Problem:
    """A path that cl, link and the DLL loader do not get through, whatever Windows is set to."""
    found = len(path) if length is None else length
    why = f"it has {found} characters; cl, link and LoadLibrary stop at {LONGEST_PATH}, whatever Windows allows"
    return Problem(f"the path {path} is too long", why, "set TORCH_EXTENSIONS_DIR=C:\\ds (or another short folder)")


def folder_is_held(folder: str) -> Problem:
    """Files that another process has open or loaded."""
    why = "another process has one of its files open or loaded, and Windows deletes no such file"
    return Problem(f"the folder {folder} cannot be replaced", why, "end the Python processes that use this package")


# --- compilers ----------------------------------------------------------------------------------------------------

_PREBUILT = "or use the prebuilt parts of the win_amd64 wheel, which need no compiler"


def no_visual_studio(why: str) -> Problem:
    """Neither a developer prompt nor Visual Studio."""
    fix = f"winget install Microsoft.VisualStudio.2022.BuildTools --override {_WORKLOAD}; {_PREBUILT}"
    return Problem("no C++ compiler was found", why, fix)


_WORKLOAD = '"--passive --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'


def no_cpp_tools(component: str) -> Problem:
    """Visual Studio without its C++ workload."""
    fix = f"add the workload 'Desktop development with C++' in the Visual Studio Installer; {_PREBUILT}"
    return Problem("Visual Studio has no C++ tools", f"vswhere finds no installation with {component}", fix)


def vswhere_unreadable(why: str) -> Problem:
    """vswhere answered something else than its JSON."""
    return Problem("vswhere gave an unreadable answer", why, f"repair Visual Studio in its Installer; {_PREBUILT}")


def vcvars_failed(script: str, why: str) -> Problem:
    """The script that makes a developer prompt."""
    return Problem(f"{script} does not work", why, f"repair Visual Studio in its Installer; {_PREBUILT}")


def cl_failed(path: str, why: str) -> Problem:
    """A cl that answers no banner."""
    return Problem(f"{path} does not work", why, f"repair Visual Studio in its Installer; {_PREBUILT}")


def no_windows_sdk(place: str) -> Problem:
    """A compiler without the C library's headers, which come with the Windows SDK."""
    why = f"{place} sets no UCRT folder in INCLUDE: corecrt.h and the C library come with the SDK"
    fix = f"add 'Windows 11 SDK' under Individual components in the Visual Studio Installer; {_PREBUILT}"
    return Problem("the Windows SDK is missing", why, fix)


def cl_of_another_machine(path: str, target: str, machine: str) -> Problem:
    """A developer prompt for x86 around a 64-bit Python."""
    fix = f"use a plain prompt (cl is found without one) or the 'x64 Native Tools' prompt; {_PREBUILT}"
    return Problem(f"{path} compiles for {target}", f"this Python is {machine}: its libraries must be too", fix)


def compiler_of_another_system(path: str, target: str, system: str) -> Problem:
    """A cross compiler, Cygwin's or MSYS's, where this system's own is needed."""
    fix = "unset CXX: Visual Studio is found without it" if system == "windows" else "set CXX to this system's compiler"
    return Problem(f"{path} compiles for {target}", f"a library that this Python on {system} loads is needed", fix)


def clang_without_msvc_command_line(path: str, target: str) -> Problem:
    """``clang++`` on Windows, whose command line takes GNU flags and whose linker does not."""
    why = f"on Windows it compiles for {target} and refuses the flags of a GNU linker"
    return Problem(
        f"{path} is not used on Windows", why, "set CXX=clang-cl, the same compiler with MSVC's command line"
    )


def compiler_out_of_range(path: str, kind: str, version: str, allowed: str) -> Problem:
    """A host compiler too old for C++17, or refused by the matrix."""
    what, why = f"{path} is version {version}", f"host libraries need C++17 of {kind} {allowed}"
    return Problem(what, why, "set CXX to a newer C++ compiler")


def compiler_unfit_for_nvcc(
    kind: str, version: tuple[int, ...], cuda: tuple[int, ...], low: str, below: str
) -> Problem:
    """A host compiler that this nvcc refuses: too new or too old."""
    numbers = tuple(int(n) for n in low.split("."))
    age = "old" if version < numbers else "new"
    allowed = f"from {low} on" + (f" and below {below}" if below else "")
    what = f"{kind} {_dotted(version)} is too {age} for the nvcc of CUDA {_dotted(cuda)}"
    fix = "unset CUDA_HOME and CUDA_PATH: NVRTC compiles GPU code without any C++ compiler"
    return Problem(what, f"that nvcc takes {kind} {allowed}", fix)


# --- drivers ------------------------------------------------------------------------------------------------------


def no_gpu_driver(system: str, tried: Iterable[str]) -> Problem:
    """No CUDA driver, or a system that has none."""
    if system == "darwin":
        why = "NVIDIA has no driver for macOS"
        return Problem("no GPU driver", why, "use the CPU ops: DeepSpeedCPUAdam instead of FusedAdam")
    fix = {"win32": "install the NVIDIA driver for Windows, 527 or newer; nvcuda.dll comes with it"}.get(
        system, "install NVIDIA driver 525 or newer (under WSL2: the Windows driver, and none inside the distribution)"
    )
    return Problem("no GPU driver", "; ".join(tried) or f"there is no CUDA driver for {system}", fix)


def no_ffi_wheel_for_musl(package: str, requirement: str) -> Problem:
    """Alpine and its kin: nobody publishes wheels of TVM-FFI for musl."""
    why = "there are wheels for glibc only, and this system has musl; NVIDIA's driver needs glibc too"
    fix = f"apk add g++ cmake ninja python3-dev linux-headers && pip install --no-binary {package} {requirement}"
    return Problem(f"{package} is missing", why, fix)


# --- for the documentation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One row of the table: the texts people report, and what this package says instead, by an example.

    Attributes:
        reported: what other tools say, as it is searched for.
        error: class of the error that carries the problem; None for a warning.
        problem: an example.
    """

    reported: tuple[str, ...]
    error: type[OpsError] | None
    problem: Problem


_CL = r"C:\VS\VC\Tools\MSVC\14.44.35207\bin\Hostx64\x64\cl.exe"
_VCVARS = r"C:\VS\VC\Auxiliary\Build\vcvars64.bat"

CATALOGUE: tuple[Fault, ...] = (
    Fault(
        ("[WinError 193] %1 is not a valid Win32 application", "No matching distribution found for torch"),
        HostUnsupported,
        python_is_32_bit("windows-x86_64", (3, 14)),
    ),
    Fault(("(no text; a build that fails later)",), None, python_is_untested((3, 15), (3, 14))),
    Fault(
        ("No module named 'tvm_ffi.core'", "DLL load failed while importing core"),
        LoadFailed,
        ffi_of_another_python(("core.cp311-win_amd64.pyd",), ".cp312-win_amd64.pyd"),
    ),
    Fault(
        ("is not a supported wheel on this platform", "[WinError 193]"),
        NoMatchingPart,
        part_of_another_platform("linux-x86_64", "windows-x86_64"),
    ),
    Fault(
        (
            "[WinError 206] The filename or extension is too long",
            "fatal error C1083: Cannot open compiler generated file",
        ),
        StoreError,
        path_is_too_long(r"C:\store\...\cpu_adam.windows-x86_64.dll.json", 271),
    ),
    Fault(
        ("failed to map segment from shared object",),
        LoadFailed,
        part_on_noexec_mount("cpu_adam.linux-x86_64.so", "failed to map segment from shared object"),
    ),
    Fault(
        ("[WinError 5] Access is denied", "[WinError 32] The process cannot access the file"),
        StoreError,
        folder_is_held(r"deepspeed_ops\parts"),
    ),
    Fault(
        (
            "Microsoft Visual C++ 14.0 or greater is required",
            "'cl' is not recognized as an internal or external command",
        ),
        CompilerMissing,
        no_visual_studio("cl is not on PATH and vswhere.exe was not found"),
    ),
    Fault(
        ("Unable to find vcvarsall.bat",),
        CompilerMissing,
        no_cpp_tools("Microsoft.VisualStudio.Component.VC.Tools.x86.x64"),
    ),
    Fault(("JSONDecodeError",), CompilerMissing, vswhere_unreadable("JSONDecodeError: Expecting value")),
    Fault(
        ("[vcvarsall.bat] ERROR: Failed to initialize environment",),
        CompilerMissing,
        vcvars_failed(_VCVARS, "it printed nothing"),
    ),
    Fault(("cl.exe failed with exit status",), CompilerMissing, cl_failed(_CL, "it printed nothing")),
    Fault(
        (
            "Cannot open include file: 'corecrt.h'",
            "cannot open file 'ucrt.lib'",
            "LNK1104: cannot open file 'kernel32.lib'",
        ),
        CompilerMissing,
        no_windows_sdk(_VCVARS),
    ),
    Fault(
        ("LNK1112: module machine type 'x86' conflicts with target machine type 'x64'",),
        CompilerMissing,
        cl_of_another_machine("cl.exe", "i386-windows-msvc", "x86_64"),
    ),
    Fault(
        ("undefined reference to __imp_...", "ImportError: DLL load failed (a Cygwin or MSYS g++)"),
        CompilerMissing,
        compiler_of_another_system("g++", "x86_64-pc-cygwin", "windows"),
    ),
    Fault(
        ("unsupported option '-fPIC' for target 'x86_64-pc-windows-msvc'",),
        CompilerMissing,
        clang_without_msvc_command_line("clang++", "x86_64-pc-windows-msvc"),
    ),
    Fault(
        ("C7555: use of designated initializers", "'if constexpr' is a C++17 language extension"),
        CompilerMissing,
        compiler_out_of_range("cl.exe", "msvc", "19.16.27054", ">=19.20"),
    ),
    Fault(
        ("#error: -- unsupported Microsoft Visual Studio version!", "STL1002: Unexpected compiler version"),
        CompilerMissing,
        compiler_unfit_for_nvcc("msvc", (19, 51, 36231), (12, 8), "19.10", "19.50"),
    ),
    Fault(
        (
            "error: expected a ';' inside cuda_runtime.h",
            "host_config.h(...): unsupported Microsoft Visual Studio version",
        ),
        CompilerMissing,
        compiler_unfit_for_nvcc("msvc", (19, 0, 24215), (13, 0), "19.20", "19.50"),
    ),
    Fault(
        ("Could not find module 'nvcuda.dll'", "CUDA driver initialization failed"),
        DriverError,
        no_gpu_driver("win32", ("nvcuda.dll: [WinError 126] The specified module could not be found",)),
    ),
    Fault(
        ("libcuda.so.1: cannot open shared object file (WSL2)",),
        DriverError,
        no_gpu_driver("linux", ("libcuda.so.1: not found", "/usr/lib/wsl/lib/libcuda.so.1: not found")),
    ),
    Fault(("Torch not compiled with CUDA enabled (macOS)",), DriverError, no_gpu_driver("darwin", ())),
    Fault(
        ("Error relocating ...: __vsnprintf_chk: symbol not found (Alpine)",),
        CompilerMissing,
        no_ffi_wheel_for_musl("apache-tvm-ffi", '"apache-tvm-ffi>=0.1"'),
    ),
)
