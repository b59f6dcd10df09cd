"""Guards against parts loaded unverified, twice, too slowly, or not at all although one fits."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from op_builder import compile as compile_room
from op_builder import loader as loader_room
from op_builder.errors import CompileFailed, DriverError, JitForbidden, LoadFailed, NoMatchingPart
from op_builder.gpus import Device
from op_builder.host import HostFacts
from op_builder.loader import Loader
from op_builder.marks import Marks
from op_builder.process import ProcessState, platform_facts
from op_builder.settings import Settings
from op_builder.sources import source_digest
from op_builder.store import Store
from op_builder.targets import Target
from op_builder.toolchain import Nvrtc, Toolchain, discover_host
from tests.toys import device_manifest, put, toy_home, toy_spec

ROOT = Path(loader_room.__file__).resolve().parent.parent
SPEC = toy_spec(device=["toy/toy.cu"], kernels=["toy_scale"])
H100 = Device(0, "GPU-1", "toy GPU", (9, 0), 1 << 30)


def settings_for(tmp_path: Path, **env: str) -> Settings:
    kept = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS") and k != "DS_OPS_PATH"}
    return Settings.read({**kept, "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit"), **env})


class Counted:
    """Gives toolchains and counts how often it was asked."""

    def __init__(self, give: Callable[[Settings, HostFacts], Toolchain]) -> None:
        self.give, self.sides = give, list[str]()

    def __call__(self, settings: Settings, host: HostFacts, side: str) -> Toolchain:
        self.sides.append(side)
        return self.give(settings, host)


def make(tmp_path: Path, tools: Counted | None = None, **env: str) -> Loader:
    home = tmp_path / "home"
    if not home.exists():
        toy_home(home)
    return Loader(
        settings_for(tmp_path, **env),
        home=home,
        state=ProcessState(),
        spec_of=lambda _: SPEC,
        tools=tools if tools is not None else Counted(discover_host),
    )


@pytest.fixture
def needs_compiler(tmp_path: Path) -> None:
    found = discover_host(settings_for(tmp_path), platform_facts())
    if found.host is None or found.host.takes_msvc_flags or found.ffi is None or found.ninja is None:
        pytest.skip(f"missing: a GNU-like C++ compiler, ninja or apache-tvm-ffi ({found.problems})")


# --- host libraries -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_compiler")
def test_an_op_is_built_once_then_found(tmp_path: Path) -> None:
    """Fault: compilers are looked for although a part lies ready; a module is loaded twice in one process."""
    tools = Counted(discover_host)
    loader = make(tmp_path, tools)
    module = loader.host_module("toy")
    assert module["answer"]() == 42
    assert loader.host_module("toy") is module and tools.sides == ["host"]
    later = Counted(discover_host)
    assert make(tmp_path, later).host_module("toy")["answer"]() == 42
    assert later.sides == []


@pytest.mark.usefixtures("needs_compiler")
def test_a_cut_library_is_built_again_and_never_mapped(tmp_path: Path) -> None:
    """Fault (half-written library): dlopen of a cut file is SIGBUS."""
    make(tmp_path).host_module("toy")
    (part,) = Store(tmp_path / "jit" / "deepspeed_ops").parts("toy")
    content = part.path.read_bytes()
    part.path.unlink()  # the file that this process has mapped stays whole
    part.path.write_bytes(content[: len(content) // 2])
    assert make(tmp_path).host_module("toy")["answer"]() == 42


@pytest.mark.usefixtures("needs_compiler")
def test_edited_sources_make_another_part(tmp_path: Path) -> None:
    """Fault (foreign binary): a stale library after an edit."""
    make(tmp_path).host_module("toy")
    (tmp_path / "home/csrc/toy/answer.h").write_text("#define TOY_ANSWER 43\n", encoding="utf-8")
    assert make(tmp_path).host_module("toy")["answer"]() == 43
    (tmp_path / "home/csrc/toy/answer.h").write_text("#define TOY_ANSWER 42\n", encoding="utf-8")
    untouched = Counted(discover_host)
    assert make(tmp_path, untouched).host_module("toy")["answer"]() == 42
    assert untouched.sides == []


@pytest.mark.usefixtures("needs_compiler")
def test_a_library_that_does_not_load_is_quarantined_and_the_chain_goes_on(tmp_path: Path) -> None:
    """Fault: one bad packaged part makes the op unusable; or it is tried again in every process."""
    good = make(tmp_path)
    good.host_module("toy")
    (part,) = Store(tmp_path / "jit" / "deepspeed_ops").parts("toy")
    bad = put(Store(tmp_path / "home/parts", "package"), dataclasses.replace(part.manifest), b"no library at all")
    loader = make(tmp_path)
    assert loader.host_module("toy")["answer"]() == 42
    assert bad.manifest.sha256 in loader.state.refused
    text = make(tmp_path).resolution("toy").explain()
    assert "quarantined" in text and str(bad.path) in text


@pytest.mark.usefixtures("needs_compiler")
def test_a_part_that_killed_the_last_process_is_tried_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a crash at load kills every process of a job, one after the other."""
    make(tmp_path).host_module("toy")
    (part,) = Store(tmp_path / "jit" / "deepspeed_ops").parts("toy")
    loader = make(tmp_path)
    marks = loader._marks(None, loader.host)
    for path in (tmp_path / "jit/deepspeed_ops/.marks").iterdir():
        path.unlink()
    marks._write(part.manifest.sha256, "trying", "left behind")
    asked: list[Path] = []
    monkeypatch.setattr(compile_room, "loads_in_child", lambda path, settings: asked.append(path) or "signal 4")
    with pytest.raises(LoadFailed, match="signal 4"):
        make(tmp_path).host_module("toy")
    assert asked == [part.path]
    monkeypatch.undo()
    for path in (tmp_path / "jit/deepspeed_ops/.marks").iterdir():
        path.unlink()
    marks._write(part.manifest.sha256, "trying", "left behind")
    assert make(tmp_path).host_module("toy")["answer"]() == 42


@pytest.mark.usefixtures("needs_compiler")
def test_a_failed_build_is_raised_as_such_and_tried_again(tmp_path: Path) -> None:
    """Fault: "no part fits" hides the compiler's error; a failure remembered."""
    loader = make(tmp_path)
    source = tmp_path / "home/csrc/toy/toy.cpp"
    text = source.read_text(encoding="utf-8")
    source.write_text("int f() { return undeclared; }", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(CompileFailed, match="undeclared"):
            make(tmp_path).host_module("toy")
    source.write_text(text, encoding="utf-8")
    assert loader.host_module("toy")["answer"]() == 42


def test_nothing_here_says_what_to_install(tmp_path: Path) -> None:
    """Fault: an ImportError or None instead of a cure."""
    bare = make(tmp_path, Counted(lambda settings, host: Toolchain()))
    with pytest.raises(NoMatchingPart, match="no part fits"):
        bare.host_module("toy")


@pytest.mark.usefixtures("needs_compiler")
def test_ds_jit_0_is_obeyed(tmp_path: Path) -> None:
    """Fault: a compiler runs on a compute node where that was forbidden."""
    with pytest.raises(JitForbidden) as err:
        make(tmp_path, DS_JIT="0").host_module("toy")
    assert err.value.fix == "unset DS_JIT"
    assert not (tmp_path / "jit").exists()


@pytest.mark.usefixtures("needs_compiler")
def test_threads_load_one_module(tmp_path: Path) -> None:
    """Fault: two threads build, or load, the same op twice."""
    tools = Counted(discover_host)
    loader, got = make(tmp_path, tools), list[Any]()
    threads = [threading.Thread(target=lambda: got.append(loader.host_module("toy"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6 and all(module is got[0] for module in got)
    assert tools.sides == ["host"]


# --- GPU parts ----------------------------------------------------------------------------------------------------


def put_image(tmp_path: Path, variant: str, content: bytes, origin: str = "package", **changes: Any) -> None:
    """A packaged GPU part of today's sources."""
    make(tmp_path)
    digest = source_digest(SPEC, "device", tmp_path / "home/csrc", "")
    root = tmp_path / "home/parts"
    put(Store(root, origin), device_manifest(variant, source_digest=digest, **changes), content)


def test_the_best_image_is_read_once_per_device(tmp_path: Path) -> None:
    """Fault: unlike GPUs of one box share an image; the file is read at every call."""
    put_image(tmp_path, "sm80", b"\x7fELF for 80")
    put_image(tmp_path, "sm90", b"\x7fELF for 90")
    loader = make(tmp_path)
    assert loader.device_image("toy", H100, (12, 4)) == b"\x7fELF for 90"
    a100 = dataclasses.replace(H100, ordinal=1, capability=(8, 6))
    assert loader.device_image("toy", a100, (12, 4)) == b"\x7fELF for 80"
    for part in Store(tmp_path / "home/parts").parts("toy"):
        part.path.unlink()
    assert loader.device_image("toy", H100, (12, 4)) == b"\x7fELF for 90"


def test_ptx_ends_with_a_nul(tmp_path: Path) -> None:
    """Fault: the driver reads PTX beyond its end."""
    put_image(tmp_path, "ptx75", b".version 8.1")
    assert make(tmp_path, Counted(lambda *_: Toolchain())).device_image("toy", H100, (12, 4)) == b".version 8.1\0"


def test_an_image_that_the_driver_refused_is_replaced(tmp_path: Path) -> None:
    """Fault: one image that a driver does not like makes the op unusable, or is handed out again."""
    put_image(tmp_path, "sm90", b"\x7fELF for 90")
    put_image(tmp_path, "ptx75", b".version 8.1")
    loader = make(tmp_path, Counted(lambda *_: Toolchain()))
    assert loader.device_image("toy", H100, (12, 4)).startswith(b"\x7fELF")
    loader.refuse_image("toy", 0, "CUDA_ERROR_INVALID_IMAGE")
    assert loader.device_image("toy", H100, (12, 4)) == b".version 8.1\0"
    loader.refuse_image("toy", 0, "CUDA_ERROR_INVALID_PTX")
    with pytest.raises(NoMatchingPart) as err:
        loader.device_image("toy", H100, (12, 4))
    assert "CUDA_ERROR_INVALID_IMAGE" in err.value.why and "CUDA_ERROR_INVALID_PTX" in err.value.why


def test_an_error_that_any_image_would_meet_quarantines_none(tmp_path: Path) -> None:
    """Fault: a GPU that was full for a moment costs the op its best part for ever."""
    put_image(tmp_path, "sm90", b"\x7fELF for 90")
    loader = make(tmp_path, Counted(lambda *_: Toolchain()))
    loader.device_image("toy", H100, (12, 4))
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        loader.refuse_image("toy", 0, "cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY2")
    assert loader.device_image("toy", H100, (12, 4)) == b"\x7fELF for 90" and not loader.state.refused


def test_a_new_driver_tries_a_refused_image_again(tmp_path: Path) -> None:
    """Fault: the verdict of an old driver outlives it."""
    put_image(tmp_path, "sm90", b"\x7fELF for 90")
    loader = make(tmp_path, Counted(lambda *_: Toolchain()))
    loader.device_image("toy", H100, (12, 4))
    loader.refuse_image("toy", 0, "CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(NoMatchingPart):
        make(tmp_path, Counted(lambda *_: Toolchain())).device_image("toy", H100, (12, 4))
    assert make(tmp_path).device_image("toy", H100, (13, 0)) == b"\x7fELF for 90"


def test_an_image_is_built_for_the_very_device_and_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: JIT for TORCH_CUDA_ARCH_LIST instead of the device; by a compiler whose code the driver refuses."""
    asked: list[tuple[str, Target | None]] = []
    monkeypatch.setattr(compile_room, "read_gpu", lambda data, what: FakeFacts(Target(9, 0)))
    monkeypatch.setattr(compile_room, "facts_as_fields", lambda facts: {"kernels": facts.kernels})

    class Fake:
        def __init__(self, found: Nvrtc) -> None:
            self.found = found

        def compile(self, *args: Any, target: Target | None) -> tuple[bytes, str]:
            asked.append((self.found.identity, target))
            return b"\x7fELF made here", ""

    monkeypatch.setattr(compile_room, "open_nvrtc", Fake)
    archs = (Target(8, 0), Target(9, 0))
    tools = Toolchain(nvrtc=tuple(Nvrtc(Path(f"n{v}"), None, v, archs, "pypi") for v in ((12, 1), (12, 8), (13, 0))))
    loader = make(tmp_path, Counted(lambda *_: tools), TORCH_CUDA_ARCH_LIST="8.0")
    put_image(tmp_path, "ptx75", b".version 8.1")
    assert loader.device_image("toy", H100, (12, 9)) == b"\x7fELF made here"
    assert asked == [("nvrtc 12.8", Target(9, 0))]


@dataclasses.dataclass
class FakeFacts:
    target: Target
    kernels: tuple[str, ...] = ("toy_scale",)


def test_a_corrupt_image_is_not_handed_out(tmp_path: Path) -> None:
    """Fault: a cut cubin reaches the driver."""
    put_image(tmp_path, "sm90", b"\x7fELF for 90")
    put_image(tmp_path, "sm80", b"\x7fELF for 80")
    for part in Store(tmp_path / "home/parts").parts("toy"):
        if "sm90" in part.path.name:
            part.path.write_bytes(b"\x7fELF")
    with pytest.raises((LoadFailed, NoMatchingPart)) as err:
        make(tmp_path, Counted(lambda *_: Toolchain())).device_image("toy", H100, (12, 4))
    assert "corrupt" in str(err.value) and "machine code for 8.0" in str(err.value)


# --- the process --------------------------------------------------------------------------------------------------


def run_child(code: str, tmp_path: Path, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "TORCH_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
             "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit"), **env},
        capture_output=True, encoding="utf-8", errors="replace", timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_state_under_two_import_names(tmp_path: Path) -> None:
    """Fault: ``op_builder`` from a checkout and ``deepspeed_ops.op_builder`` load every op twice."""
    out = run_child(
        "import op_builder.process as a, deepspeed_ops.op_builder.process as b\n"
        "a.process_state().modules['toy'] = 'loaded'\n"
        "print(a is not b, b.process_state() is a.process_state())\n"
        "from deepspeed_ops.op_builder.loader import host_module\n"
        "print(host_module('toy'))\n",
        tmp_path,
    )
    assert out.split() == ["True", "True", "loaded"]


def test_importing_the_builder_is_quiet_and_light(tmp_path: Path) -> None:
    """Fault: ``import op_builder`` runs compilers, opens NVML or the FFI, or prints."""
    out = run_child(
        "import sys, op_builder, op_builder.loader\n"
        "heavy = {'torch', 'tvm_ffi', 'pynvml', 'rich', 'filelock', 'ninja'}\n"
        "print(sorted(heavy & set(sys.modules)))\n",
        tmp_path,
    )
    assert out == "[]"


def test_the_environment_is_as_before_after_importing_the_ffi(tmp_path: Path) -> None:
    """Fault: a switch set for one import stays for every child process."""
    for value in (None, "0"):
        env = {} if value is None else {"TVM_FFI_DISABLE_TORCH_C_DLPACK": value}
        out = run_child(
            "import os; from op_builder.loader import import_ffi\n"
            "before = dict(os.environ); import_ffi(); import_ffi()\n"
            "print(dict(os.environ) == before)\n",
            tmp_path,
            **env,
        )
        assert out == "True"


def test_host_code_asks_for_images_by_name_and_errors_keep_their_class(tmp_path: Path) -> None:
    """Fault: an error of ours reaches Python as a bare RuntimeError after its way through C++."""
    out = run_child(
        "from op_builder import loader, errors\n"
        "ffi = loader.import_ffi()\n"
        "loader.process_state().images['toy', 3] = b'image'\n"
        "ask = ffi.get_global_func('deepspeed_ops.device_image')\n"
        "print(bytes(ask('toy', 3, 9, 0, 12040, False)).decode())\n"
        "try:\n    ask('no_such_op', 0, 9, 0, 12040, False)\n"
        "except errors.UsageError as exc:\n    print('UsageError', 'no_such_op' in str(exc))\n",
        tmp_path,
    )
    assert out.splitlines() == ["image", "UsageError True"]


def test_a_forked_child_gets_fresh_locks() -> None:
    """Fault: a lock that another thread of the parent held blocks the child for ever."""
    state = ProcessState()
    held = state.op_lock("toy")
    state.renew_locks()
    assert state.op_lock("toy") is not held


def test_marks_of_a_loader_survive_an_unwritable_store(tmp_path: Path) -> None:
    """Fault: a read-only home folder is an error although a packaged part fits."""
    put_image(tmp_path, "sm90", b"\x7fELF for 90")
    blocker = tmp_path / "jit"
    blocker.touch()
    loader = make(tmp_path)
    assert loader.device_image("toy", H100, (12, 4)) == b"\x7fELF for 90"
    assert isinstance(loader._marks(None, loader.host), Marks)
