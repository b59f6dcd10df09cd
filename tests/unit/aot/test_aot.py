"""Guards against ops silently absent from a build, parts for the wrong targets, and compilers of the wrong release."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from op_builder import aot
from op_builder.aot import Report, asked_ops, build_ahead, build_requires, targets_for
from op_builder.compile import CompilePlan
from op_builder.errors import ArchListError, CompilerMissing, OpBuildError, UsageError
from op_builder.gpus import Driver
from op_builder.host import HostFacts
from op_builder.matrix import load
from op_builder.plan import PartPlan
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.store import Part, Store
from op_builder.targets import Target, ship_set
from op_builder.toolchain import FFI, HostCompiler, Nvcc, Nvrtc, Problem, Toolchain, discover_host
from tests.toys import device_manifest, host_manifest, put, toy_home, toy_spec

SPECS = {
    "toy": toy_spec(),
    "gpu": toy_spec("gpu", host=["toy/toy.cpp"], device=["toy/toy.cu"], min_sm=[6, 0]),
}
LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36))
GXX = HostCompiler("gcc", Path("g++"), (12, 2, 0), "x86_64-linux-gnu", "g++ 12.2.0", ("g++",))
HOST_TOOLS = Toolchain(GXX, Path("ninja"), ffi=FFI((), Path("lib"), Path("l"), "0.1.15"))


def nvrtc(*release: int) -> Nvrtc:
    pair = (release[0], release[1])
    return Nvrtc(Path(f"nvrtc{pair}"), None, pair, tuple(Target(*c) for c in load().targets_of(pair)), "pypi")


def with_gpu(*compilers: Nvrtc | Nvcc) -> Toolchain:
    nvrtcs = tuple(c for c in compilers if isinstance(c, Nvrtc))
    return Toolchain(GXX, Path("ninja"), tuple(c for c in compilers if isinstance(c, Nvcc)), nvrtcs, HOST_TOOLS.ffi)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[PartPlan]:
    """Replaces the compilers: every part of a plan is published as if it had been built."""
    seen: list[PartPlan] = []

    def fake(plan: CompilePlan, store: Store, settings: Settings, say: Any, ninja: Path | None) -> tuple[Part, ...]:
        seen.extend(plan.parts)
        made = []
        for part in plan.parts:
            name = {"op": part.op, "key": part.key, "filename": part.filename}
            manifest = host_manifest(**name) if part.kind == "host" else device_manifest(part.variant, **name)
            made.append(put(store, manifest))
        return tuple(made)

    monkeypatch.setattr(aot, "build", fake)
    return seen


def go(tmp_path: Path, tools: Toolchain, env: dict[str, str], **given: Any) -> Report:
    home = tmp_path / "home"
    if not home.exists():
        toy_home(home)
    kept = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "jit"), **env}
    arguments: dict[str, Any] = {"home": home, "specs": SPECS, "toolchain": tools, "fetch": False, "host": LINUX}
    return build_ahead(tmp_path / "parts", Settings.read(kept, specs=SPECS), **{**arguments, **given})


def test_what_is_asked_for() -> None:
    """Fault: DS_BUILD_X without effect, or weaker than DS_BUILD_OPS."""

    def asked(**env: str) -> dict[str, bool]:
        return asked_ops(Settings.read(env, specs=SPECS), SPECS)

    assert asked() == {}
    assert asked(DS_BUILD_OPS="1") == {"toy": False, "gpu": False}
    assert asked(DS_BUILD_OPS="1", DS_BUILD_TOY="0", DS_BUILD_GPU="1") == {"gpu": True}
    assert asked(DS_BUILD_OPS="0", DS_BUILD_TOY="1") == {"toy": True}
    assert asked_ops(Settings.read({}), SPECS, ["gpu"]) == {"gpu": True}
    with pytest.raises(UsageError):
        asked_ops(Settings.read({}), SPECS, ["gpux"])


def test_targets_are_the_users_list_or_the_shipped_set() -> None:
    """Fault: an arch list whose order matters; targets the op does not support; PTX that every driver refuses."""
    gpu = SPECS["gpu"]
    listed = targets_for(gpu, Settings.read({"TORCH_CUDA_ARCH_LIST": "8.6;5.2;7.5"}))
    assert listed == {Target(7, 5): None, Target(8, 6): None}
    assert list(listed) == sorted(listed)
    assert targets_for(gpu, Settings.read({})) == dict(ship_set())
    assert targets_for(gpu, Settings.read({}), "native", [(9, 0)]) == {Target(9, 0): None}
    assert targets_for(SPECS["toy"], Settings.read({"TORCH_CUDA_ARCH_LIST": "8.6"})) == {}
    with pytest.raises(ArchListError):
        targets_for(gpu, Settings.read({"TORCH_CUDA_ARCH_LIST": "sm_90"}))


def test_the_shipped_set_is_made_by_the_oldest_release_that_has_each(tmp_path: Path, compiled: list[PartPlan]) -> None:
    """Fault: parts that only the newest driver loads."""
    tools = with_gpu(*(nvrtc(*release) for release in load().cuda))
    report = go(tmp_path, tools, {"DS_BUILD_GPU": "1"})
    made = {p.target: p.compiler_release for p in compiled if p.target}
    assert made == dict(ship_set()) and made[Target(9, 0)] == (12, 1) and made[Target(10, 0)] == (12, 8)
    assert not report.notes and not report.skipped
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["gpu"]


def test_a_users_list_is_made_by_the_newest_compiler_that_his_driver_takes(
    tmp_path: Path, compiled: list[PartPlan]
) -> None:
    """Fault: a wheel built on a machine that this machine's own driver refuses."""
    tools, env = with_gpu(nvrtc(12, 4), nvrtc(13, 0)), {"DS_BUILD_GPU": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    go(tmp_path, tools, env)
    go(tmp_path, tools, env, host=HostFacts("linux", "x86_64", "glibc", (2, 36), driver=Driver("550.1", (12, 4))))
    assert [p.compiler_release for p in compiled if p.target] == [(13, 0), (12, 4)]


def test_a_missing_release_is_brought_in_once(
    tmp_path: Path, compiled: list[PartPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: sm_61 under CUDA 13 alone fails instead of taking a 12.x compiler."""
    fetched: list[str] = []
    monkeypatch.setattr(aot, "fetch_nvrtc", lambda requirement, folder, settings: fetched.append(requirement))

    def found(settings: Settings, host: HostFacts, *, paths: Sequence[str]) -> Toolchain:
        return Toolchain(nvrtc=(nvrtc(12, 1),))

    monkeypatch.setattr(aot, "discover_gpu", found)
    said: list[str] = []
    env = {"DS_BUILD_GPU": "1", "TORCH_CUDA_ARCH_LIST": "6.0;6.1;9.0"}
    go(tmp_path, with_gpu(nvrtc(13, 0)), env, fetch=True, say=said.append)
    assert fetched == [load().cuda[12, 1].nvrtc] and said == [f"fetching {fetched[0]}"]
    assert {p.variant: p.compiler_release for p in compiled if p.target} == {
        "sm60": (12, 1), "sm61": (12, 1), "sm90": (13, 0),
    }  # fmt: skip


def test_without_the_oldest_release_another_serves_and_it_is_noted(
    tmp_path: Path, compiled: list[PartPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: offline builds impossible; or a part that asks more of the driver, without a word."""

    def offline(requirement: str, folder: Path, settings: Settings) -> None:
        raise CompilerMissing(f"{requirement} could not be installed", "no network")

    monkeypatch.setattr(aot, "fetch_nvrtc", offline)
    monkeypatch.setattr(aot, "discover_gpu", lambda *args, **kwargs: Toolchain())
    report = go(tmp_path, with_gpu(nvrtc(12, 8)), {"DS_BUILD_GPU": "1"}, fetch=True)
    assert {p.compiler_release for p in compiled if p.target} == {(12, 8)}
    assert any(n.startswith("sm90 by CUDA 12.8 instead of 12.1: no network") for n in report.notes)
    assert not any(n.startswith("sm100 ") for n in report.notes)


def test_an_op_asked_for_by_name_that_cannot_be_built_is_an_error(tmp_path: Path, compiled: list[PartPlan]) -> None:
    """Fault (asked-for op silently absent): a wheel without the op that was asked for, and exit code 0."""
    bare = Toolchain(problems=(Problem("no C++ compiler was found", "PATH has none", "apt-get install g++"),))
    with pytest.raises(OpBuildError) as err:
        go(tmp_path, bare, {"DS_BUILD_TOY": "1"})
    text = str(err.value)
    assert "op toy" in text and "PATH has none" in text and "apt-get install g++" in text and "DS_BUILD_TOY=0" in text
    with pytest.raises(OpBuildError, match="op gpu"):
        go(tmp_path, with_gpu(nvrtc(13, 0)), {"DS_BUILD_GPU": "1", "TORCH_CUDA_ARCH_LIST": "6.1"})


def test_ds_build_ops_lists_what_it_skipped_and_why(tmp_path: Path, compiled: list[PartPlan]) -> None:
    """Fault: an op or a target left out without a reason; DS_BUILD_X=0 ignored."""
    env = {"DS_BUILD_OPS": "1", "TORCH_CUDA_ARCH_LIST": "6.1;9.0"}
    report = go(tmp_path, with_gpu(nvrtc(13, 0)), env)
    assert [(b.op, b.variant) for b in report.built] == [
        ("toy", "linux-x86_64"), ("gpu", "linux-x86_64"), ("gpu", "sm90"),
    ]  # fmt: skip
    assert [(s.op, s.variant) for s in report.skipped] == [("gpu", "sm61")]
    assert "sm_61" in report.skipped[0].why
    report = go(tmp_path, HOST_TOOLS, {"DS_BUILD_OPS": "1", "DS_BUILD_GPU": "0"})
    assert [b.op for b in report.built] == ["toy"]
    assert [(s.op, s.why) for s in report.skipped] == [("gpu", "DS_BUILD_GPU=0")]
    text = "\n".join(report.lines())
    assert "built    toy linux-x86_64 by g++ 12.2.0" in text and "skipped  gpu: DS_BUILD_GPU=0" in text
    assert report.as_dict()["built"]


def test_ds_build_ops_that_builds_nothing_is_an_error(tmp_path: Path) -> None:
    """Fault: "build everything" ends well with an empty wheel."""
    with pytest.raises(OpBuildError, match="built no op"):
        go(tmp_path, Toolchain(), {"DS_BUILD_OPS": "1"})


def test_requirements_hold_one_release_per_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: two releases of one distribution asked for, which no installer can satisfy."""

    def needs(here: Toolchain, **env: str) -> tuple[str, ...]:
        monkeypatch.setattr(aot, "discover_gpu", lambda *args, **kwargs: here)
        monkeypatch.setattr(aot, "detect", lambda env: LINUX)
        return build_requires(Settings.read(env, specs=SPECS), SPECS)

    asked = {"DS_BUILD_OPS": "1"}
    assert needs(Toolchain(), **asked, TORCH_CUDA_ARCH_LIST="6.1;7.5;8.6") == (load().cuda[12, 1].nvrtc,)
    assert needs(Toolchain(), **asked) == (load().cuda[12, 8].nvrtc,)
    both = needs(Toolchain(), **asked, TORCH_CUDA_ARCH_LIST="6.1;11.0")
    assert both == (load().cuda[12, 1].nvrtc, load().cuda[13, 0].nvrtc)
    assert needs(with_gpu(nvrtc(13, 0)), **asked, TORCH_CUDA_ARCH_LIST="9.0") == ()
    assert needs(Toolchain()) == () and needs(Toolchain(), DS_BUILD_TOY="1") == ()


def test_a_toy_is_really_built(tmp_path: Path) -> None:
    """Fault: everything above holds for fakes only."""
    settings = Settings.read({k: v for k, v in os.environ.items() if not k.endswith("FLAGS")})
    tools = discover_host(settings, platform_facts())
    if tools.host is None or tools.host.takes_msvc_flags or tools.ffi is None or tools.ninja is None:
        pytest.skip(f"missing: a GNU-like C++ compiler, ninja or apache-tvm-ffi ({tools.problems})")
    said: list[str] = []
    env = {"PATH": os.environ["PATH"], "DS_BUILD_TOY": "1"}
    report = go(tmp_path, tools, env, host=platform_facts(), say=said.append)
    (built,) = report.built
    assert (tmp_path / "parts" / built.path).stat().st_size == built.size
    assert said == [f"toy {platform_facts().platform}: {built.compiler}"]
    assert len(Store(tmp_path / "parts").parts("toy")) == 1


@pytest.mark.parametrize("name", sorted(all_specs()))
def test_every_ops_own_variable(name: str, tmp_path: Path, compiled: list[PartPlan]) -> None:
    """Fault: a variable that another op answers to, or that does nothing. 1 builds this op alone, 0 leaves it out."""
    spec = all_specs()[name]
    env = {"TORCH_CUDA_ARCH_LIST": "9.0"}
    home = Path(aot.HOME)

    def built(**more: str) -> tuple[set[tuple[str, str]], Report]:
        compiled.clear()
        settings = Settings.read({**env, **more, "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit")})
        tools = with_gpu(nvrtc(13, 0))
        parts = tmp_path / f"parts{len(more)}"
        report = build_ahead(parts, settings, LINUX, home=home, toolchain=tools, fetch=False)
        return {(p.op, p.kind) for p in compiled}, report

    wanted = {(name, kind) for kind, sources in (("host", spec.host), ("device", spec.device)) if sources}
    parts, report = built(**{spec.env_var: "1"})
    assert parts == wanted
    assert any(name in note for note in report.notes) is spec.python_only
    parts, report = built(**{spec.env_var: "0", "DS_BUILD_OPS": "1"})
    assert name not in {op for op, _ in parts} and len(parts) > 1
    assert [(s.op, s.why) for s in report.skipped] == [(name, f"{spec.env_var}=0")]
