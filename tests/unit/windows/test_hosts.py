"""The odd corners on recorded hosts: 32-bit and untested Pythons, foreign wheels, WSL2, musl, macOS, aarch64."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from op_builder import loader, nvrtc
from op_builder.compile import refuse_long_paths
from op_builder.cuda_toolkits import Nvrtc
from op_builder.driver import Driver
from op_builder.errors import DriverError, HostUnsupported, LoadFailed, NoMatchingPart, StoreError
from op_builder.gpus import driver_without_nvml, read_gpus
from op_builder.host import HostFacts, detect
from op_builder.plan import PartPlan, host_flags, library_name, plan_host
from op_builder.process import ProcessState, check_python
from op_builder.resolve import Accepted, Rejected, Want, resolve
from op_builder.settings import Settings
from op_builder.store import Store, default_extensions_dir
from op_builder.toolchain import FFI, HostCompiler, Kind, Problem, Toolchain, find_ffi, find_host_compiler
from tests.toys import fake_part, host_manifest, toy_home, toy_spec

ROOT = Path(__file__).resolve().parents[3]
LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36))
WINDOWS = HostFacts("windows", "x86_64")
MUSL = HostFacts("linux", "x86_64", "musl")
ARM = HostFacts("linux", "aarch64", "glibc", (2, 34))
MACOS = HostFacts("macos", "aarch64")
WANT = Want("s" * 64, "tvm-ffi 0.1")


def compiler(kind: Kind, target: str) -> HostCompiler:
    return HostCompiler(kind, Path("/t/cxx"), (14, 0), target, f"{kind} {target}", ("/t/cxx",))


# --- Python -------------------------------------------------------------------------------------------------------


def test_a_32_bit_python_is_refused_before_anything_is_built() -> None:
    """Fault: [WinError 193] from a DLL that was found, verified and loaded into the wrong kind of process."""
    with pytest.raises(HostUnsupported) as caught:
        check_python(ProcessState(), wide=False)
    assert "32-bit" in caught.value.what and "64-bit" in caught.value.why and caught.value.fix
    check_python(ProcessState(), wide=True, version=(3, 12))


def test_a_python_newer_than_tested_warns_once() -> None:
    """Fault: silence, or a warning for every op."""
    state = ProcessState()
    with pytest.warns(RuntimeWarning, match=r"3\.16 is newer than tested.*3\.14"):
        check_python(state, version=(3, 16), newest=(3, 14))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_python(state, version=(3, 16), newest=(3, 14))
        check_python(ProcessState(), version=(3, 14), newest=(3, 14))


@pytest.mark.parametrize(
    ("held", "fits"),
    [("core.cp312-win_amd64.pyd", True), ("core.pyd", True), ("core.cp311-win_amd64.pyd", False), ("", False)],
)
def test_ffi_of_another_python(tmp_path: Path, held: str, fits: bool) -> None:
    """Fault: "No module named 'tvm_ffi.core'" and nothing about the wheel being another Python's."""
    (tmp_path / "tvm_ffi").mkdir()
    (tmp_path / "tvm_ffi" / "__init__.py").touch()
    if held:
        (tmp_path / "tvm_ffi" / held).touch()
    problem = loader._foreign_ffi([str(tmp_path)], (".cp312-win_amd64.pyd", ".pyd"))
    assert (problem is None) is fits
    if problem is not None:
        assert "another Python" in problem.what and ".cp312-win_amd64.pyd" in problem.why
        assert (held or "no core module") in problem.why and "--force-reinstall" in problem.fix


def test_the_import_error_of_a_foreign_ffi_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the diagnosis exists and is not asked where the import fails."""
    found = Problem("apache-tvm-ffi was installed for another Python", "it holds x", "fix")
    monkeypatch.setattr(loader, "_foreign_ffi", lambda: found)
    told = loader._no_ffi(ModuleNotFoundError("No module named 'tvm_ffi.core'"))
    assert isinstance(told, LoadFailed) and told.what == found.what and "tvm_ffi.core" in told.why
    assert "cannot be imported" in loader._no_ffi(ImportError("No module named 'tvm_ffi'")).what


# --- parts of another platform ------------------------------------------------------------------------------------

PARTS = {
    "linux-x86_64": host_manifest(),
    "linux-aarch64": host_manifest(variant="linux-aarch64", platform="linux-aarch64", key="a" * 64),
    "windows-x86_64": host_manifest(
        variant="windows-x86_64", platform="windows-x86_64", glibc=None, needed=("tvm_ffi.dll",), key="w" * 64
    ),
    "macos-aarch64": host_manifest(
        variant="macos-aarch64", platform="macos-aarch64", glibc=None, needed=("libtvm_ffi.dylib",), key="m" * 64
    ),
}


@pytest.mark.parametrize("host", [LINUX, WINDOWS, ARM, MACOS], ids=lambda h: h.platform)
def test_every_platform_takes_its_own_part_and_no_other(host: HostFacts) -> None:
    """Fault: a wheel for another platform, forced in with --platform or copied, is loaded."""
    found = resolve(toy_spec(), host, None, [fake_part(m) for m in PARTS.values()], None, WANT)
    assert found.choice is not None and found.choice.part is not None
    assert found.choice.part.manifest.platform == host.platform
    rejected = [v for v in found.trace if isinstance(v, Rejected)]
    assert len(rejected) == 3 and all(v.axis == "platform" and host.platform in v.why for v in rejected)


def test_only_a_foreign_wheel_is_here() -> None:
    """Fault: "no part fits" without a word that the wheel is another platform's, or without a cure."""
    found = resolve(toy_spec(), WINDOWS, None, [fake_part(PARTS["linux-x86_64"])], None, WANT)
    error = found.error()
    assert isinstance(error, NoMatchingPart)
    assert "made for linux-x86_64, this is windows-x86_64" in error.why and "--force-reinstall" in error.fix


# --- paths --------------------------------------------------------------------------------------------------------


def windows_plan(tmp_path: Path) -> PartPlan:
    lib = Path("C:/py/tvm_ffi/lib")
    tools = Toolchain(
        compiler("msvc", "x86_64-windows-msvc"), Path("ninja"), ffi=FFI((lib,), lib, lib / "tvm_ffi.lib", "0.1.9")
    )
    home = toy_home(tmp_path / "home")
    return plan_host(toy_spec(), tools, Settings.read({}), WINDOWS, home / "csrc", "1")


@pytest.mark.parametrize(("extra", "fits"), [(10, True), (200, False)])
def test_paths_that_the_compiler_does_not_get_through(tmp_path: Path, extra: int, fits: bool) -> None:
    """Fault: C1083 "cannot open compiler generated file" with a path cut in the middle."""
    part, store = windows_plan(tmp_path), Store(Path("C:/x") / ("y" * extra))
    if fits:
        refuse_long_paths(part, store, windows=True)
    else:
        with pytest.raises(StoreError, match="too long") as caught:
            refuse_long_paths(part, store, windows=True)
        assert "259" in caught.value.why and "TORCH_EXTENSIONS_DIR" in caught.value.fix
    refuse_long_paths(part, store, windows=False)  # other systems take them


def test_the_default_store_leaves_room_for_every_op(tmp_path: Path) -> None:
    """Fault: the default folder itself is too deep for a user with a long name."""
    base = default_extensions_dir({"USERPROFILE": "C:\\Users\\" + "u" * 20}, "win32")
    if base is not None and sys.platform != "win32":  # a Windows path is relative here; only its length matters
        pytest.fail("a path that is not absolute was taken for a home folder")
    local = default_extensions_dir({"LOCALAPPDATA": f"/Users/{'u' * 20}/AppData/Local"}, "win32")
    assert local is not None
    refuse_long_paths(windows_plan(tmp_path), Store(local / "deepspeed_ops"), windows=True)


# --- DLLs ---------------------------------------------------------------------------------------------------------


def test_nvrtc_finds_its_companions_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fault: nvrtc64_*.dll does not find nvrtc-builtins64_*.dll, which lies beside it but not on PATH."""
    events: list[str] = []
    names = SimpleNamespace(name="nt", add_dll_directory=lambda folder: events.append(f"folder {folder}"))
    monkeypatch.setattr(nvrtc, "os", names)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda path, mode: events.append(Path(path).name))
    library, builtins = tmp_path / "nvrtc64_120_0.dll", tmp_path / "nvrtc-builtins64_128.dll"
    nvrtc._open(Nvrtc(library, builtins, (12, 8), (), "torch"))
    assert events == [f"folder {tmp_path}", builtins.name, library.name]


def opening(**answers: object) -> Any:
    """Opens libraries by name: what is not given is not there."""
    tried: list[str] = []

    def load(name: str) -> object:
        tried.append(name)
        if name not in answers:
            raise OSError(f"{name}: not found")
        return answers[name]

    load.tried = tried  # type: ignore[attr-defined]
    return load


@pytest.mark.parametrize(
    ("system", "asked", "word"),
    [
        ("win32", ["nvcuda.dll"], "NVIDIA driver for Windows"),
        ("linux", ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"], "WSL2"),
        ("darwin", [], "DeepSpeedCPUAdam"),
    ],
)
def test_no_gpu_driver(system: str, asked: list[str], word: str) -> None:
    """Fault: a library opened at import; "install a driver" where no such driver exists."""
    load = opening()
    with pytest.raises(DriverError) as caught:
        Driver.open(load, system)
    assert load.tried == asked and word in caught.value.fix and caught.value.why


# --- WSL2 ---------------------------------------------------------------------------------------------------------


def test_the_driver_of_wsl_is_found_outside_the_loader_path() -> None:
    """Fault: WSL's libcuda lies where no linker cache looks."""
    wsl = "/usr/lib/wsl/lib/libcuda.so.1"

    class Library:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> int:
                if name == "cuDriverGetVersion":
                    args[0]._obj.value = 12080
                return 0

            return call

    assert Driver.open(opening(**{wsl: Library()}), "linux").version == (12, 8)


@pytest.mark.parametrize("nvml", [True, False], ids=["NVML", "an old release without NVML"])
def test_wsl(tmp_path: Path, nvml: bool) -> None:
    """Fault: an old WSL driver without NVML is an error, or the user is sent to install a Linux driver inside WSL."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("5.15.90-microsoft-standard-WSL2\n", encoding="utf-8")
    (tmp_path / "proc/cpuinfo").write_text("flags : avx2 fma f16c avx\n", encoding="utf-8")

    class Nvml:
        nvmlInit = nvmlShutdown = staticmethod(lambda: None)
        nvmlSystemGetDriverVersion = staticmethod(lambda: "551.86")
        nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 12040)
        nvmlDeviceGetCount = staticmethod(lambda: 0)

    class NoNvml:
        @staticmethod
        def nvmlInit() -> None:
            raise RuntimeError("NVML Shared Library Not Found")

    facts = detect({}, root=tmp_path, system="linux", machine="x86_64", nvml=Nvml if nvml else NoNvml)
    assert facts.wsl and facts.platform == "linux-x86_64"
    if nvml:
        assert facts.driver is not None and facts.driver.cuda == (12, 4)
    else:
        assert facts.driver is None and any("/usr/lib/wsl/lib" in n and "wsl --update" in n for n in facts.notes)
        assert driver_without_nvml(tmp_path) is None


def test_linux_that_is_no_wsl(tmp_path: Path) -> None:
    """Fault: every kernel with a long name is taken for WSL."""
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.1.0-18-amd64\n", encoding="utf-8")
    assert not detect({}, root=tmp_path, system="linux", machine="x86_64", nvml=None).wsl
    assert not any("WSL" in note for note in read_gpus({}, tmp_path, SimpleNamespace()).notes)


# --- musl ---------------------------------------------------------------------------------------------------------


def test_musl_refuses_glibc_parts_and_builds() -> None:
    """Fault: a manylinux part is loaded on Alpine: "symbol not found", after it was chosen."""
    lib = Path("/ffi/lib")
    tools = Toolchain(
        compiler("gcc", "x86_64-alpine-linux-musl"), Path("ninja"), ffi=FFI((lib,), lib, lib / "libtvm_ffi.so", "0.1.9")
    )
    with_compiler = resolve(toy_spec(), MUSL, None, [fake_part(host_manifest())], tools, WANT)
    assert with_compiler.action == "build"
    assert [v.axis for v in with_compiler.trace if isinstance(v, Rejected)] == ["musl"]
    own = host_manifest(needed=("libc.musl-x86_64.so.1",), glibc=None, key="m" * 64)
    assert resolve(toy_spec(), MUSL, None, [fake_part(own)], None, WANT).action == "load"
    assert resolve(toy_spec(), LINUX, None, [fake_part(own)], None, WANT).action == "fail"


def test_musl_without_compiler_or_ffi(tmp_path: Path) -> None:
    """Fault: "pip install apache-tvm-ffi" as the cure, where there is no wheel to install."""
    problems: list[Problem] = []
    assert (
        find_host_compiler(Settings.read({"PATH": str(tmp_path)}), MUSL, lambda argv: pytest.fail("ran"), problems)
        is None
    )
    assert problems[0].fix == "apk add g++"
    missing = find_ffi(MUSL, [str(tmp_path)])
    assert isinstance(missing, Problem) and "musl" in missing.why and "apk add" in missing.fix
    glibc = find_ffi(LINUX, [str(tmp_path)])
    assert isinstance(glibc, Problem) and glibc.fix.startswith("pip install")
    refused = resolve(
        toy_spec(), MUSL, None, [fake_part(host_manifest())], Toolchain(problems=(*problems, missing)), WANT
    )
    assert refused.action == "fail" and "musl" in refused.error().why and "apk add" in refused.error().fix


# --- macOS and aarch64 --------------------------------------------------------------------------------------------


def test_macos_has_cpu_ops_and_nothing_of_linux(tmp_path: Path) -> None:
    """Fault: -z now or -shared given to Apple's linker; a .so where a .dylib is expected; libaio or CUDA asked for."""
    lib = Path("/ffi/lib")
    ffi = FFI((lib,), lib, lib / "libtvm_ffi.dylib", "0.1.9")
    tools = Toolchain(compiler("clang", "arm64-apple-darwin23"), Path("ninja"), ffi=ffi)
    part = plan_host(toy_spec(), tools, Settings.read({}), MACOS, toy_home(tmp_path) / "csrc", "1")
    assert part.filename == "toy.macos-aarch64.dylib"
    assert "-dynamiclib" in part.link_flags and not any("-z," in f or "aio" in f for f in part.link_flags)
    compiling, _ = host_flags("clang", "macos")
    assert not any(f.startswith(("-march", "-mcpu", "-Wno-maybe")) for f in compiling)
    facts = detect({}, root=tmp_path, system="darwin", machine="arm64", nvml=SimpleNamespace())
    assert facts.platform == "macos-aarch64" and "neon" in facts.cpu_features and facts.driver is None


def test_macos_without_a_compiler(tmp_path: Path) -> None:
    """Fault: apt-get as the cure on a Mac."""
    problems: list[Problem] = []
    find_host_compiler(Settings.read({"PATH": str(tmp_path)}), MACOS, lambda argv: pytest.fail("ran"), problems)
    assert problems[0].fix == "xcode-select --install"


def test_aarch64_linux(tmp_path: Path) -> None:
    """Fault: x86 levels planned for ARM, or ARM taken for a Jetson."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("Features : fp asimd sve\n", encoding="utf-8")
    facts = detect({}, root=tmp_path, system="linux", machine="arm64", nvml=SimpleNamespace())
    assert facts.platform == "linux-aarch64" and facts.cpu_features == {"neon", "sve"}
    assert not any("Jetson" in note for note in facts.notes)
    assert library_name("cpu_adam", ARM) == "cpu_adam.linux-aarch64.so"
    spec = toy_spec(simd={"x86_64": ["avx2", "scalar"], "aarch64": ["neon", "scalar"]})
    assert spec.simd["aarch64"] == ("neon", "scalar")
    found = resolve(spec, ARM, None, [fake_part(PARTS["linux-aarch64"])], None, WANT)
    assert isinstance(found.choice, Accepted)
