"""Guards against builds that break on a path, hide their first error, or are remembered as done when they failed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from op_builder import compile as compile_room
from op_builder.compile import build, build_part, free_bytes, job_count
from op_builder.errors import CompileFailed, CompilerMissing, StoreError
from op_builder.host import HostFacts
from op_builder.manifest import read_elf
from op_builder.nvrtc import NvrtcFailed
from op_builder.plan import CompilePlan, PartPlan, plan_device, plan_host
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.store import Store, verify
from op_builder.targets import Target
from op_builder.toolchain import Nvrtc, Toolchain, discover_gpu, discover_host
from tests.toys import toy_home, toy_spec

SETTINGS = Settings.read({k: v for k, v in os.environ.items() if not k.endswith("FLAGS")})
HOST = platform_facts()
SPEC = toy_spec(device=["toy/toy.cu"], kernels=["toy_scale"])


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    found = discover_host(SETTINGS, HOST)
    if found.host is None or found.ffi is None or found.ninja is None or found.host.takes_msvc_flags:
        pytest.skip(f"missing: a GNU-like C++ compiler, ninja or apache-tvm-ffi ({found.problems})")
    return found


def host_part(home: Path, tools: Toolchain, settings: Settings = SETTINGS, **spec: Any) -> PartPlan:
    return plan_host(toy_spec(**spec), tools, settings, HOST, home / "csrc", "1.2.3")


def test_a_toy_builds_below_a_hostile_path(tmp_path: Path, tools: Toolchain) -> None:
    """Fault (quoting): package or store below a path with a blank, ``$``, ``:`` and quotes."""
    home = toy_home(tmp_path / "a b$HOME:c'd\"e")
    store = Store(tmp_path / "st $ore:'")
    said: list[str] = []
    part = build_part(host_part(home, tools), store, SETTINGS, said.append, tools.ninja)
    verify(part)
    assert said == [f"toy {HOST.platform}: {part.manifest.compiler}"]
    assert part.manifest.platform == HOST.platform and part.manifest.abi == "tvm-ffi 0.1"
    again = build_part(host_part(home, tools), store, SETTINGS, said.append, tools.ninja)
    assert again == part and len(said) == 1


def test_a_library_needs_little_and_says_so(tmp_path: Path, tools: Toolchain) -> None:
    """Fault (CPU op linked to CUDA): a CUDA library, libtorch or libpython in NEEDED, or a RUNPATH."""
    if HOST.system != "linux":
        pytest.skip("readelf's facts: this is no Linux")
    part = build_part(host_part(toy_home(tmp_path), tools), Store(tmp_path / "s"), SETTINGS, None, tools.ninja)
    facts = read_elf(part.path)
    assert part.manifest.needed == facts.needed
    assert not [n for n in facts.needed if any(w in n for w in ("cuda", "torch", "python", "c10"))]
    assert not facts.runpath
    assert part.manifest.glibc == facts.glibc


def test_equal_sources_give_equal_bytes(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: a path of the build machine inside the library, by __FILE__ or by LD_RUN_PATH (as conda builds set it)."""
    parts = []
    for name in ("one", "another"):
        settings = Settings.read({**SETTINGS.env, "LD_RUN_PATH": str(tmp_path / name / "lib")})
        home, store = toy_home(tmp_path / name), Store(tmp_path / name / "s")
        parts.append(build_part(host_part(home, tools), store, settings, None, tools.ninja))
    assert parts[0].manifest == parts[1].manifest
    assert str(tmp_path).encode() not in parts[0].path.read_bytes()


def test_many_sources_build_in_parallel(tmp_path: Path, tools: Toolchain) -> None:
    """Fault (object names collide): two sources share one object path; fails only under -j."""
    home = toy_home(tmp_path)
    names = ["toy/toy.cpp"]
    for number in range(8):
        path = home / "csrc" / f"d{number}" / "same.cpp"
        path.parent.mkdir()
        path.write_text(f"int same_{number}() {{ return {number}; }}\n", encoding="utf-8")
        names.append(f"d{number}/same.cpp")
    settings = dataclasses.replace(SETTINGS, max_jobs=8)
    part = build_part(host_part(home, tools, settings, host=names), Store(tmp_path / "s"), settings, None, tools.ninja)
    verify(part)


def test_a_failed_build_shows_its_first_error_every_time(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: "ninja: build stopped" as the message; a failure remembered as done; a log that is gone."""
    home, store = toy_home(tmp_path), Store(tmp_path / "s")
    (home / "csrc/toy/toy.cpp").write_text("int f() { return undeclared; }\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(CompileFailed) as err:
            build_part(host_part(home, tools), store, SETTINGS, None, tools.ninja)
        first = err.value.why.splitlines()[0]
        assert "undeclared" in first and "error" in first
        assert "-c " in err.value.why and "exit code: 1" in err.value.why
        assert "undeclared" in Path(err.value.log).read_text(encoding="utf-8")
    assert store.parts("toy") == ()
    (home / "csrc/toy/toy.cpp").write_text("int f() { return 1; }\n", encoding="utf-8")
    assert build_part(host_part(home, tools), store, SETTINGS, None, tools.ninja).path.is_file()


def test_a_missing_symbol_is_an_error_of_the_build(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: an undefined symbol found in the middle of a training run."""
    home = toy_home(tmp_path)
    (home / "csrc/toy/toy.cpp").write_text("void nowhere(); void f() { nowhere(); }\n", encoding="utf-8")
    with pytest.raises(CompileFailed, match="nowhere"):
        build_part(host_part(home, tools), Store(tmp_path / "s"), SETTINGS, None, tools.ninja)


def test_user_flags_reach_the_compiler_and_the_manifest(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: CXXFLAGS and CPPFLAGS that only a probe reads; LDFLAGS that only a probe reads."""
    home = toy_home(tmp_path)
    (home / "csrc/toy/toy.cpp").write_text("int f() { return GIVEN; }\n", encoding="utf-8")
    settings = dataclasses.replace(SETTINGS, cppflags=("-DGIVEN=1",), ldflags=("-Wl,-z,relro",))
    part = build_part(host_part(home, tools, settings), Store(tmp_path / "s"), settings, None, tools.ninja)
    assert part.manifest.user_flags == ("-DGIVEN=1", "-Wl,-z,relro") == settings.user_flags


def test_without_ninja_the_cure_is_named(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: FileNotFoundError of a program the user never heard of."""
    with pytest.raises(CompilerMissing) as err:
        build_part(host_part(toy_home(tmp_path), tools), Store(tmp_path / "s"), SETTINGS)
    assert err.value.fix == "pip install ninja"


def test_a_full_disk_is_said_to_be_full(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: a full disk reported as an error of the sources."""
    script = tmp_path / "g++"
    script.write_text("#!/bin/sh\necho 'x.o: No space left on device' >&2\nexit 1\n", encoding="utf-8")
    script.chmod(0o755)
    assert tools.host is not None
    full = dataclasses.replace(tools, host=dataclasses.replace(tools.host, argv=(str(script),)))
    with pytest.raises(StoreError, match="full"):
        build_part(host_part(toy_home(tmp_path), full), Store(tmp_path / "s"), SETTINGS, None, tools.ninja)


def test_a_compiler_that_does_not_start_is_a_failed_build(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: a bare OSError."""
    with pytest.raises(CompileFailed, match="did not start"):
        build_part(host_part(toy_home(tmp_path), tools), Store(tmp_path / "s"), SETTINGS, None, tmp_path / "no-ninja")


# --- GPU parts ----------------------------------------------------------------------------------------------------


def device_part(home: Path, tools: Toolchain, target: Target, **spec: Any) -> PartPlan:
    compiler = (*tools.nvrtc, *tools.nvcc)[0]
    return plan_device(toy_spec(**{"device": ["toy/toy.cu"], "kernels": ["toy_scale"], **spec}), target, compiler,
                       home / "csrc", "1.2.3")  # fmt: skip


@pytest.mark.parametrize("kind", ["nvcc", "nvrtc"])
@pytest.mark.parametrize("variant", ["sm90", "sm90a", "ptx75"])
def test_both_gpu_compilers_make_what_was_asked_for(
    tmp_path: Path, kind: str, variant: str, nvrtc_folders: Mapping[tuple[int, int], Path]
) -> None:
    """Fault (quoting, and "arch read back"): a hostile path; a part for another architecture than its name says."""
    folder = str(nvrtc_folders[13, 0])
    found = discover_gpu(SETTINGS, HostFacts("linux", "x86_64", "glibc", (2, 36)), paths=[folder])
    tools = Toolchain(nvcc=found.nvcc[:1]) if kind == "nvcc" else Toolchain(nvrtc=found.nvrtc[:1])
    if not (tools.nvcc or tools.nvrtc):
        pytest.skip(f"missing: {kind}")
    home = toy_home(tmp_path / "a b$HOME:c'd")
    part = build_part(device_part(home, tools, Target.from_variant(variant)), Store(tmp_path / "s $'"), SETTINGS)
    verify(part)
    assert part.manifest.variant == variant and "toy_scale" in part.manifest.kernels
    assert (part.manifest.ptx_isa is not None) == variant.startswith("ptx")
    assert part.manifest.compiler_release == (*tools.nvrtc, *tools.nvcc)[0].version


class FakeNvrtc:
    """Answers with a prepared image and remembers what it was given."""

    def __init__(self, image: bytes) -> None:
        self.image = image
        self.calls: list[tuple[str, str, dict[str, str], tuple[str, ...], Target | None]] = []

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str], *, target: Target | None
    ) -> tuple[bytes, str]:
        self.calls.append((source, name, dict(headers), tuple(options), target))
        if not self.image:
            raise NvrtcFailed("nvrtc failed", "toy.cu(2): error: no", "", "toy.cu(1): warning\ntoy.cu(2): error: no")
        return self.image, ""


PTX = b".version 8.1\n.target sm_75\n.address_size 64\n.visible .entry toy_scale()\n{\nret;\n}\n"
NVRTC = Nvrtc(Path("libnvrtc.so"), None, (12, 1), (Target(7, 5),), "pypi")


def fake_nvrtc(monkeypatch: pytest.MonkeyPatch, image: bytes) -> FakeNvrtc:
    fake = FakeNvrtc(image)
    monkeypatch.setattr(compile_room, "open_nvrtc", lambda found: fake)
    return fake


def test_nvrtc_gets_sources_and_headers_in_memory_and_no_include_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: NVRTC depends on headers of the machine; several sources collide; flags differ from nvcc's."""
    fake = fake_nvrtc(monkeypatch, PTX)
    home = toy_home(tmp_path)
    (home / "csrc/toy/more.cu").write_text('#include "toy/scale.cuh"\n', encoding="utf-8")
    tools = Toolchain(nvrtc=(NVRTC,))
    one = device_part(home, tools, Target(7, 5, "ptx"))
    two = device_part(home, tools, Target(7, 5, "ptx"), device=["toy/toy.cu", "toy/more.cu"])
    plan = CompilePlan((one, two))
    assert len(build(plan, Store(tmp_path / "s"), SETTINGS)) == 2
    single, unity = sorted(fake.calls, key=lambda call: len(call[2]))
    assert single[1] == "toy/toy.cu" and set(single[2]) == {"toy/scale.cuh"}
    assert unity[0] == '#include "toy/toy.cu"\n#include "toy/more.cu"\n'
    assert set(unity[2]) == {"toy/scale.cuh", "toy/toy.cu", "toy/more.cu"}
    assert not [o for o in single[3] if o.startswith("-I")] and "--std=c++17" in single[3]


def test_a_gpu_part_for_another_arch_or_without_its_kernel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a part whose name lies."""
    fake_nvrtc(monkeypatch, PTX)
    tools, home = Toolchain(nvrtc=(NVRTC,)), toy_home(tmp_path)
    for part in (
        device_part(home, tools, Target(8, 0, "ptx")),
        device_part(home, tools, Target(7, 5, "ptx"), kernels=["absent"]),
    ):
        with pytest.raises(CompileFailed, match="another part than asked for"):
            build_part(part, Store(tmp_path / "s"), SETTINGS)
    assert Store(tmp_path / "s").parts("toy") == ()


def test_a_failed_gpu_build_shows_its_first_error_and_keeps_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: NVRTC_ERROR_COMPILATION and nothing else."""
    fake_nvrtc(monkeypatch, b"")
    with pytest.raises(CompileFailed) as err:
        build_part(device_part(toy_home(tmp_path), Toolchain(nvrtc=(NVRTC,)), Target(7, 5)), Store(tmp_path), SETTINGS)
    assert err.value.why.splitlines()[0] == "toy.cu(2): error: no"
    assert "-gencode=arch=compute_75,code=sm_75" in err.value.what
    assert "warning" in Path(err.value.log).read_text(encoding="utf-8")


# --- jobs ---------------------------------------------------------------------------------------------------------


def test_jobs_follow_max_jobs_then_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: MAX_JOBS ignored; a container killed for its memory."""
    assert job_count(dataclasses.replace(SETTINGS, max_jobs=3)) == 3
    monkeypatch.setattr(compile_room, "free_bytes", lambda: 600 << 20)
    assert job_count(dataclasses.replace(SETTINGS, max_jobs=None)) == 1
    monkeypatch.setattr(compile_room, "free_bytes", lambda: None)
    assert job_count(dataclasses.replace(SETTINGS, max_jobs=None)) >= 1


def test_free_memory_counts_the_containers_limit(tmp_path: Path) -> None:
    """Fault: the host's memory taken for the container's."""
    assert free_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n", encoding="utf-8")
    assert free_bytes(tmp_path) == 1000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n", encoding="utf-8")
    assert free_bytes(tmp_path) == 1000 * 1024
    (group / "memory.max").write_text("5000\n", encoding="utf-8")
    (group / "memory.current").write_text("1000\n", encoding="utf-8")
    assert free_bytes(tmp_path) == 4000


def test_a_killed_child_is_told_from_one_that_loads(tmp_path: Path) -> None:
    """Fault: a part that kills its process is tried in this one again."""
    blank = tmp_path / "x.so"
    blank.write_bytes(b"no library")
    assert "ended with" in compile_room.loads_in_child(blank, SETTINGS)


def test_a_compiler_package_that_cannot_be_had_says_so(tmp_path: Path) -> None:
    """Fault: a traceback of pip where one line was needed."""
    offline = dataclasses.replace(SETTINGS, env={**SETTINGS.env, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull})
    with pytest.raises(CompilerMissing, match=r"no-such-compiler==1\.0") as err:
        compile_room.fetch_nvrtc("no-such-compiler==1.0", tmp_path / "c", offline)
    assert err.value.why
    assert shutil.which("pip") or "No module named pip" not in err.value.why
