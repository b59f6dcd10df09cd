"""The win_amd64 wheel: its tag is read from DLLs, its parts are whole, its GPU parts are those of Linux."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from deepspeed_ops.op_builder.errors import StoreError, UsageError

from deepspeed_ops import wheel
from op_builder.manifest import Manifest, read_pe
from op_builder.spec import all_specs
from tests.toys import host_manifest
from tests.unit.windows.recorded import WindowsDisk

ROOT = Path(__file__).resolve().parents[3]


def tool() -> ModuleType:
    """``ci/windows.py`` as a module."""
    spec = importlib.util.spec_from_file_location("ci_windows", ROOT / "ci" / "windows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dll(machine: int = 0x8664, needed: tuple[str, ...] = ("tvm_ffi.dll",), exports: tuple[str, ...] = ()) -> bytes:
    """The smallest PE32+ that has imports and exports: one section whose addresses are its offsets."""
    base = 0x200
    body = bytearray(0x600)
    names = base + 0x300
    cursor = names

    def text(value: str) -> int:
        nonlocal cursor
        at = cursor
        body[at - base : at - base + len(value) + 1] = value.encode() + b"\0"
        cursor += len(value) + 1
        return at

    for i, name in enumerate(needed):
        struct.pack_into("<IIIII", body, i * 20, 1, 0, 0, text(name), 1)
    table = base + 0x200
    struct.pack_into("<I", body, 0x100 + 24, len(exports))
    struct.pack_into("<I", body, 0x100 + 32, table)
    for i, name in enumerate(exports):
        struct.pack_into("<I", body, 0x200 + i * 4, text(name))
    optional = bytearray(240)
    struct.pack_into("<H", optional, 0, 0x20B)
    struct.pack_into("<I", optional, 108, 16)
    struct.pack_into("<I", optional, 112, base + 0x100 if exports else 0)
    struct.pack_into("<I", optional, 120, base if needed else 0)
    section = b".all\0\0\0\0" + struct.pack("<IIII", len(body), base, len(body), base) + bytes(16)
    header = b"PE\0\0" + struct.pack("<HHIIIHH", machine, 1, 0, 0, 0, len(optional), 0x2022) + bytes(optional) + section
    start = b"MZ" + bytes(0x3A) + struct.pack("<I", 0x40)
    return (start + header).ljust(base, b"\0") + bytes(body)


def put(parts: Path, content: bytes, op: str = "toy", platform: str = "windows-x86_64") -> Manifest:
    """A host part on disk with a manifest that fits."""
    name = f"{op}.{platform}.dll"
    folder = parts / op / f"{platform}-{'k' * 20}"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
    made = host_manifest(op=op, variant=platform, platform=platform, glibc=None, needed=("tvm_ffi.dll",))
    made = made.with_file(folder / name)
    (folder / f"{name}.json").write_text(made.to_json(), encoding="utf-8")
    return made


def test_exports_and_imports_of_a_dll() -> None:
    """Fault: what a DLL offers is believed from the source instead of read from the file."""
    facts = read_pe(dll(needed=("tvm_ffi.dll", "KERNEL32.dll"), exports=("__tvm_ffi_a", "__tvm_ffi_b")))
    assert facts.machine == "x86_64" and facts.needed == ("tvm_ffi.dll", "KERNEL32.dll")
    assert facts.exports == ("__tvm_ffi_a", "__tvm_ffi_b")
    assert read_pe(dll(needed=())).exports == () and read_pe(dll(needed=())).needed == ()


def test_a_dll_that_lies_about_its_exports() -> None:
    """Fault: a count of four billion names is walked through."""
    content = bytearray(dll(exports=("a",)))
    struct.pack_into("<I", content, 0x200 + 0x100 + 24, 0xFFFFFFFF)
    with pytest.raises(Exception, match="says that it exports"):
        read_pe(bytes(content))


def test_the_tag_is_proved_by_the_dlls(tmp_path: Path) -> None:
    """Fault: a wheel cross-built on Linux is called linux_x86_64, or win_amd64 whatever is in it."""
    put(tmp_path, dll(needed=("tvm_ffi.dll", "KERNEL32.dll", "msvcrt.dll", "VCRUNTIME140_1.dll")))
    assert wheel.platform_tag(tmp_path) == "win_amd64"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (dll(machine=0xAA64), "aarch64"),
        (dll(needed=("libstdc++-6.dll",)), r"libstdc\+\+-6"),
        (dll(needed=("python311.dll",)), "python311"),
        (dll(needed=("nvcuda.dll",)), "nvcuda"),
    ],
)
def test_a_dll_that_strangers_cannot_load_makes_no_wheel(tmp_path: Path, content: bytes, word: str) -> None:
    """Fault: the wheel needs the compiler's own DLLs, one Python, a GPU driver, or another CPU."""
    put(tmp_path, content)
    with pytest.raises(UsageError, match=word):
        wheel.platform_tag(tmp_path)


def test_finished_parts_are_taken_as_they_are(tmp_path: Path) -> None:
    """Fault: `build_ext --parts` builds again, keeps parts of an earlier build, or accepts an empty folder."""
    made = put(tmp_path / "ready", dll())
    put(tmp_path / "parts", b"old", op="old")
    wheel.build_parts(tmp_path / "parts", env={"PATH": ""}, ready=tmp_path / "ready")
    assert [m.op for m in wheel.manifests(tmp_path / "parts")] == ["toy"]
    assert [m.to_json() for m in wheel.manifests(tmp_path / "parts")] == [made.to_json()]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no part"):
        wheel.build_parts(tmp_path / "parts", env={"PATH": ""}, ready=tmp_path / "empty")


@pytest.mark.parametrize("loaded", [False, True])
def test_parts_that_a_process_has_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """Fault: [WinError 5] and a traceback from `pip install -e .` while a notebook is open."""
    put(tmp_path, dll())
    disk = WindowsDisk()
    if loaded:
        disk.hold(next(tmp_path.rglob("*.dll")))
    monkeypatch.setattr(wheel, "FILES", disk.files())
    if loaded:
        with pytest.raises(StoreError, match="cannot be replaced") as caught:
            wheel.build_parts(tmp_path, env={"PATH": ""})
        assert "open or loaded" in caught.value.why and caught.value.fix
    else:
        wheel.build_parts(tmp_path, env={"PATH": ""})
        assert not tmp_path.exists()


def archive(path: Path, parts: Path) -> Path:
    """A wheel of these parts and nothing else."""
    with zipfile.ZipFile(path, "w") as out:
        for file in parts.rglob("*"):
            if file.is_file():
                out.write(file, f"deepspeed_ops/parts/{file.relative_to(parts).as_posix()}")
    return path


def test_the_finished_wheel_is_read_back(tmp_path: Path) -> None:
    """Fault: an op is missing, a DLL is another platform's, a file was damaged, and the wheel is published."""
    check = tool().check_wheel
    good, name = tmp_path / "parts", "deepspeed-1-py3-none-win_amd64.whl"
    for op, spec in all_specs().items():
        if spec.host:
            put(good, dll(), op=op)
    check(archive(tmp_path / name, good))
    with pytest.raises(Exception, match="another tag"):
        check(archive(tmp_path / "deepspeed-1-py3-none-any.whl", good))
    first = next(op for op, spec in all_specs().items() if spec.host)
    kept = tmp_path / "kept"
    shutil.copytree(good, kept)
    shutil.rmtree(good / first)
    with pytest.raises(Exception, match=f"lacks host parts(.|\n)*{first}"):
        check(archive(tmp_path / name, good))
    next((kept / first).rglob("*.dll")).write_bytes(dll(needed=()))
    with pytest.raises(Exception, match="damaged"):
        check(archive(tmp_path / name, kept))


def test_gpu_parts_do_not_depend_on_the_system(tmp_path: Path) -> None:
    """Fault: the Windows wheel's GPU code is not that of Linux' wheel, and is tested by nobody."""
    from op_builder.cuda_toolkits import Nvrtc, release_archs
    from op_builder.plan import plan_device
    from op_builder.targets import Target
    from tests.toys import toy_home, toy_spec

    spec = toy_spec(device=["toy/toy.cu"], kernels=["toy_scale"])
    csrc = toy_home(tmp_path) / "csrc"
    target = Target.from_variant("sm90")
    keys = set()
    for library in ("nvrtc64_120_0.dll", "libnvrtc.so.12"):
        found = Nvrtc(Path(library), None, (12, 8), release_archs((12, 8)), "pypi")
        keys.add(plan_device(spec, target, found, csrc, "1").key)
    assert len(keys) == 1


def test_the_workflow_fits_the_schema_of_workflows(tmp_path: Path) -> None:
    """Fault: a generated workflow that the service refuses, found out a day later."""
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    path = ROOT / ".github" / "workflows" / "windows.yml"
    assert check_workflow(path) == 0
    broken = tmp_path / "broken.yml"
    broken.write_text(path.read_text(encoding="utf-8").replace("runs-on:", "run-on:"), encoding="utf-8")
    assert check_workflow(broken) != 0


def check_workflow(path: Path) -> int:
    """Exit status of check-jsonschema, which brings the schema along."""
    asked = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(asked, capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL).returncode


@pytest.mark.parametrize(
    ("windows", "linux", "equal"),
    [
        ("a 1\nb 2\n", "a 1\nb 2\n", True),
        ("a 1\nb 2\n", "a 1\nb 3\n", False),
        ("a 1\n", "a 1\nb 2\n", False),
        ("a 1\nb 2\n", "a 1\n", False),
    ],
)
def test_the_proof_sees_other_numbers(windows: str, linux: str, equal: bool) -> None:
    """Fault: a proof that cannot fail: another digest, or a line too many or too few, counts as equal."""
    if equal:
        assert "2 lines" in tool().compare("toy", windows, linux)
    else:
        with pytest.raises(Exception, match="other numbers"):
            tool().compare("toy", windows, linux)
