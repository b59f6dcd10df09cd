"""Guards against a part chosen that cannot run, one refused that could, and a refusal without its reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_builder.errors import JitForbidden, NoMatchingPart
from op_builder.gpus import Device, Driver
from op_builder.host import HostFacts
from op_builder.manifest import Manifest
from op_builder.resolve import AXES, BUILD, EXACT, PTX, Accepted, Rejected, Resolution, Want, resolve
from op_builder.store import Part, Unreadable
from op_builder.targets import Target
from op_builder.toolchain import FFI, HostCompiler, Nvrtc, Problem, Toolchain
from tests.toys import device_manifest, fake_part, host_manifest, toy_spec

LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36), driver=Driver("580.1", (13, 0)))
WANT = Want("s" * 64, "tvm-ffi 0.1")
SPEC = toy_spec(device=["toy/toy.cu"], kernels=["toy_scale"], min_sm=[6, 0])
GXX = HostCompiler("gcc", Path("g++"), (12, 2, 0), "x86_64-linux-gnu", "g++ 12.2.0", ("g++",))
FULL = Toolchain(GXX, Path("ninja"), ffi=FFI((), Path("lib"), Path("lib/libtvm_ffi.so"), "0.1.15"))


def nvrtc(release: tuple[int, int], *archs: tuple[int, int]) -> Nvrtc:
    return Nvrtc(Path(f"nvrtc{release}"), None, release, tuple(Target(*a) for a in archs), "pypi")


def gpu(major: int, minor: int, tegra: bool = False) -> Device:
    return Device(0, "GPU-1", "toy GPU", (major, minor), 1 << 30, tegra)


def driver(*cuda: int) -> HostFacts:
    return dataclasses.replace(LINUX, driver=Driver("", (cuda[0], cuda[1])))


def on_gpu(device: Device, *manifests: Manifest, host: HostFacts = LINUX, tools: Toolchain | None = None) -> Resolution:
    return resolve(SPEC, host, device, [fake_part(m) for m in manifests], tools, WANT)


def chosen(resolution: Resolution) -> str:
    choice = resolution.choice
    assert choice is not None, resolution.explain()
    if choice.part is not None:
        return choice.part.manifest.variant
    assert choice.target is not None
    return f"build {choice.target.variant}"


def axis(resolution: Resolution) -> str:
    assert resolution.choice is None, resolution.explain()
    (verdict,) = resolution.trace
    assert isinstance(verdict, Rejected)
    assert verdict.why
    return verdict.axis


# --- host parts ---------------------------------------------------------------------------------------------------


def test_a_fitting_library_is_loaded() -> None:
    """Fault: a prebuilt library that fits is built again."""
    part = fake_part(host_manifest())
    got = resolve(SPEC, LINUX, None, [part], FULL, WANT)
    assert got.action == "load" and got.choice is not None and got.choice.part == part


@pytest.mark.parametrize(
    ("changes", "host", "want", "expected"),
    [
        ({"platform": "windows-x86_64"}, {}, {}, "platform"),
        ({"platform": "linux-aarch64"}, {}, {}, "platform"),
        ({"glibc": (2, 38)}, {}, {}, "glibc"),
        ({}, {"libc": "musl", "libc_version": ()}, {}, "musl"),
        ({"needed": ("libc.musl-x86_64.so.1",), "glibc": None}, {}, {}, "musl"),
        ({"source_digest": "t" * 64}, {}, {}, "sources"),
        ({"abi": "tvm-ffi 0.2"}, {}, {}, "abi"),
        ({"user_flags": ("-march=native",)}, {}, {}, "user-flags"),
        ({"user_flags": ("-O0",)}, {}, {"user_flags": ("-O1",)}, "user-flags"),
        ({"sha256": "bad"}, {}, {"quarantined": {"bad": "it crashed"}}, "quarantined"),
        ({}, {}, {"missing": {"libaio": ("not found", "apt-get install libaio-dev")}}, "needs"),
    ],
)
def test_a_foreign_library_is_refused_with_its_axis(
    changes: dict[str, Any], host: dict[str, Any], want: dict[str, Any], expected: str
) -> None:
    """Fault (foreign binary): a library of another system, C library, source or flag is loaded."""
    facts, asked = dataclasses.replace(LINUX, **host), dataclasses.replace(WANT, **want)
    got = resolve(SPEC, facts, None, [fake_part(host_manifest(**changes))], None, asked)
    assert axis(got) == expected


def test_corrupt_parts_are_refused_by_path_and_by_manifest() -> None:
    """Fault: a damaged part is offered again and again."""
    part = fake_part(host_manifest())
    assert axis(resolve(SPEC, LINUX, None, [part], None, dataclasses.replace(WANT, corrupt={part.path: "cut"}))) == (
        "corrupt"
    )
    assert axis(resolve(SPEC, LINUX, None, [Unreadable(Path("/x.json"), "jit", "no JSON")], None, WANT)) == "corrupt"


def test_the_users_flags_prefer_a_part_built_with_them() -> None:
    """Fault: CXXFLAGS without effect; or a conda environment that sets CXXFLAGS refuses every packaged part."""
    plain, flagged = fake_part(host_manifest()), fake_part(host_manifest(key="f", user_flags=("-g",)), "jit")
    want = dataclasses.replace(WANT, user_flags=("-g",))
    assert resolve(SPEC, LINUX, None, [plain, flagged], FULL, want).choice == Accepted(
        str(flagged.path), EXACT, flagged
    )
    only = resolve(SPEC, LINUX, None, [plain], FULL, want)
    assert only.action == "load" and only.choice is not None and only.choice.part == plain


def test_stores_are_preferred_in_their_order() -> None:
    """Fault: DS_OPS_PATH without effect."""
    parts = [fake_part(host_manifest(), origin) for origin in ("jit", "share", "DS_OPS_PATH", "package")]
    got = resolve(SPEC, LINUX, None, parts, FULL, WANT)
    assert [v.part.origin for v in got.trace if isinstance(v, Accepted) and v.part] == [
        "DS_OPS_PATH", "package", "share", "jit",
    ]  # fmt: skip


def test_without_a_part_the_library_is_built_or_the_error_says_what_to_install() -> None:
    """Fault: a late failure without the reason."""
    assert resolve(SPEC, LINUX, None, [], FULL, WANT).action == "build"
    bare = Toolchain(problems=(Problem("no C++ compiler was found", "PATH has none", "apt-get install g++"),))
    got = resolve(SPEC, LINUX, None, [], bare, WANT)
    error = got.error()
    assert isinstance(error, NoMatchingPart)
    assert error.fix == "apt-get install g++" and "PATH has none" in error.why


# --- GPU parts ----------------------------------------------------------------------------------------------------


def test_the_order_of_gpu_parts() -> None:
    """Fault: a slower or more fragile part is taken although a better one is there."""
    device, tools = gpu(8, 9), Toolchain(nvrtc=(nvrtc((12, 1), (8, 9)),))
    order = [device_manifest(v) for v in ("sm89", "sm86", "sm80")]
    last = device_manifest("ptx75")
    for first in range(len(order)):
        assert chosen(on_gpu(device, *reversed(order[first:]), last, tools=tools)) == order[first].variant
    assert chosen(on_gpu(device, last, tools=tools)) == "build sm89"
    assert chosen(on_gpu(device, last, tools=Toolchain())) == "ptx75"
    assert on_gpu(device).action == "fail"


def test_specific_and_family_parts() -> None:
    """Fault: ``a`` taken as compatible upwards; ``f`` outside its family; a plain exact part not preferred."""
    parts = [device_manifest(v, (12, 9)) for v in ("sm90a", "sm90")]
    assert chosen(on_gpu(gpu(9, 0), *parts)) == "sm90"
    assert chosen(on_gpu(gpu(9, 0), parts[0])) == "sm90a"
    family, older = device_manifest("sm100f", (12, 9)), device_manifest("sm100", (12, 8))
    assert chosen(on_gpu(gpu(10, 3), older, family)) == "sm100f"
    assert axis(on_gpu(gpu(12, 0), family)) == "arch"
    assert axis(on_gpu(gpu(10, 3), device_manifest("sm100a", (12, 8)))) == "arch"


@pytest.mark.parametrize(
    ("device", "manifest", "host", "expected"),
    [
        (gpu(9, 0), device_manifest("sm80"), LINUX, "arch"),
        (gpu(8, 0), device_manifest("sm86"), LINUX, "arch"),
        (gpu(7, 0), device_manifest("ptx75"), LINUX, "arch"),
        (gpu(5, 2), device_manifest("ptx50"), LINUX, "arch"),
        (gpu(8, 7, True), device_manifest("sm80"), LINUX, "tegra"),
        (gpu(8, 9), device_manifest("sm87"), LINUX, "tegra"),
        (gpu(9, 0), device_manifest("sm90", (13, 0)), driver(12, 8), "driver"),
        (gpu(9, 0), device_manifest("sm90"), driver(11, 8), "driver"),
        (gpu(9, 0), device_manifest("ptx75", ptx_isa=(8, 7)), driver(12, 1), "ptx-isa"),
        (gpu(9, 0), device_manifest("sm90", kernels=("other",)), LINUX, "sources"),
        (gpu(9, 0), device_manifest("sm90", source_digest="t"), LINUX, "sources"),
    ],
)
def test_a_gpu_part_that_cannot_run_is_refused_with_its_axis(
    device: Device, manifest: Manifest, host: HostFacts, expected: str
) -> None:
    """Fault (unsupported device): "no kernel image" at the first launch instead of an error that names both."""
    assert axis(on_gpu(device, manifest, host=host)) == expected


def test_a_driver_branch_below_an_architectures_floor_is_refused() -> None:
    """Fault: machine code for sm_100 on a 12.x driver that predates it."""
    old = dataclasses.replace(LINUX, driver=Driver("550.54", (12, 4)))
    assert axis(on_gpu(gpu(10, 0), device_manifest("sm100", (12, 8)), host=old)) == "driver"


def test_building_respects_the_driver_and_falls_back_within_the_major() -> None:
    """Fault: code of a CUDA 13 compiler on a CUDA 12 driver; no build although an older target of the major runs."""
    tools = Toolchain(nvrtc=(nvrtc((13, 0), (9, 0)), nvrtc((12, 8), (9, 0), (10, 0))))
    choice = on_gpu(gpu(9, 0), host=driver(12, 9), tools=tools).choice
    assert choice is not None and choice.compiler == tools.nvrtc[1]
    assert chosen(on_gpu(gpu(10, 3), tools=Toolchain(nvrtc=(nvrtc((12, 8), (10, 0)),)))) == "build sm100"
    got = on_gpu(gpu(6, 1), tools=Toolchain(nvrtc=(nvrtc((13, 0), (7, 5)),)))
    assert axis(got) == "compiler"
    error = got.error()
    assert "sm_75" in error.why and error.fix.startswith("pip install nvidia-cuda-nvrtc-cu12")


def test_a_device_below_the_ops_minimum_is_told_so() -> None:
    """Fault: a compiler error, or wrong results, on a GPU the op does not support."""
    got = on_gpu(gpu(5, 2), device_manifest("sm52"), tools=Toolchain(nvrtc=(nvrtc((12, 1), (5, 2)),)))
    assert got.action == "fail" and "needs compute capability 6.0, the device has 5.2" in got.explain()


def test_ds_jit_0_forbids_building_and_nothing_else() -> None:
    """Fault: a compiler runs although it was forbidden; or the PTX that would do is not taken."""
    tools, want = Toolchain(nvrtc=(nvrtc((12, 1), (8, 9)),)), dataclasses.replace(WANT, jit=False)
    got = resolve(SPEC, LINUX, gpu(8, 9), [], tools, want)
    assert isinstance(got.error(), JitForbidden) and got.error().fix == "unset DS_JIT"
    part = fake_part(device_manifest("ptx75"))
    assert chosen(resolve(SPEC, LINUX, gpu(8, 9), [part], tools, want)) == "ptx75"


def test_the_trace_names_every_candidate_with_its_reason() -> None:
    """Fault: "not compatible" without saying what was looked at."""
    parts = [device_manifest(v) for v in ("sm80", "sm90", "ptx75")]
    text = on_gpu(gpu(9, 0), *parts).explain()
    assert text.splitlines()[0] == "op toy on GPU 0 toy GPU (compute capability 9.0, driver for CUDA 13.0): load"
    for manifest in parts:
        assert manifest.filename in text
    assert "chosen (exact)" in text and "also fits (PTX" in text and "arch: machine code for 8.0" in text


# --- properties ---------------------------------------------------------------------------------------------------

VARIANTS = [
    "sm60",
    "sm70",
    "sm75",
    "sm80",
    "sm86",
    "sm87",
    "sm89",
    "sm90",
    "sm90a",
    "sm100",
    "sm100f",
    "sm103",
    "sm120",
]
manifests = st.builds(
    device_manifest,
    st.sampled_from([*VARIANTS, "ptx75", "ptx90", "ptx120"]),
    st.sampled_from([(12, 1), (12, 8), (12, 9), (13, 0)]),
    source_digest=st.sampled_from(["s" * 64, "s" * 64, "t" * 64]),
    key=st.text("abc", min_size=1, max_size=3),
)
candidates = st.builds(fake_part, manifests, st.sampled_from(["DS_OPS_PATH", "package", "share", "jit"]))
parts_lists = st.lists(candidates, max_size=8, unique_by=lambda part: part.path)
devices = st.sampled_from(
    [gpu(6, 1), gpu(7, 5), gpu(8, 0), gpu(8, 7, True), gpu(8, 9), gpu(9, 0), gpu(10, 3), gpu(12, 1)]
)
drivers = st.sampled_from([driver(11, 8), driver(12, 1), driver(12, 9), driver(13, 0)])


def runs(device: Device, host: HostFacts, part: Part) -> bool:
    """The vendor's rules once more, written from DESIGN.md and independent of the code under test."""
    found = part.manifest
    assert host.driver is not None and host.driver.cuda is not None
    if found.source_digest != WANT.source_digest or host.driver.cuda < (12, 0):
        return False
    target = Target.from_variant(found.variant)
    level = (target.major, target.minor)
    if target.kind == "ptx":
        isa = {(12, 1): (8, 1), (12, 9): (8, 8), (13, 0): (9, 0)}[host.driver.cuda]
        return level <= device.capability and found.ptx_isa is not None and found.ptx_isa <= isa
    if found.compiler_release is None or found.compiler_release[0] > host.driver.cuda[0]:
        return False
    if target.suffix == "a":
        return level == device.capability
    if target.suffix == "f":
        return level[0] == device.capability[0] and level <= device.capability
    systems_on_chip = {(8, 7)}
    if device.capability in systems_on_chip or level in systems_on_chip:
        return level == device.capability
    return level[0] == device.capability[0] and level <= device.capability


@settings(max_examples=300, deadline=None)
@given(parts_lists, devices, drivers, st.booleans())
def test_accepts_exactly_what_runs(parts: list[Part], device: Device, host: HostFacts, jit: bool) -> None:
    """Fault: the rules of what runs where, in either direction."""
    got = resolve(SPEC, host, device, parts, None, dataclasses.replace(WANT, jit=jit))
    accepted = {v.part for v in got.trace if isinstance(v, Accepted)}
    assert accepted == {p for p in parts if runs(device, host, p)}
    assert all(v.axis in AXES and v.why for v in got.trace if isinstance(v, Rejected))
    assert len(got.trace) == len(parts)


@settings(max_examples=200, deadline=None)
@given(parts_lists, devices, drivers, st.randoms(use_true_random=False))
def test_the_order_of_the_parts_does_not_matter(parts: list[Part], device: Device, host: HostFacts, rng: Any) -> None:
    """Fault: the choice depends on the order in which a file system lists folders."""
    shuffled = list(parts)
    rng.shuffle(shuffled)
    tools = Toolchain(nvrtc=(nvrtc((12, 8), (8, 9), (9, 0)),))
    assert resolve(SPEC, host, device, parts, tools, WANT) == resolve(SPEC, host, device, shuffled, tools, WANT)


@settings(max_examples=200, deadline=None)
@given(parts_lists, devices, drivers)
def test_without_jit_nothing_is_built_and_a_build_never_beats_ready_machine_code(
    parts: list[Part], device: Device, host: HostFacts
) -> None:
    """Fault: DS_JIT=0 ignored; or a compiler runs although machine code that fits lies there."""
    tools = Toolchain(nvrtc=(nvrtc((12, 8), (6, 1), (7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0)),))
    without = resolve(SPEC, host, device, parts, tools, dataclasses.replace(WANT, jit=False))
    assert without.action != "build"
    got = resolve(SPEC, host, device, parts, tools, WANT)
    assert got.choice is None or got.choice.rank == min(v.rank for v in got.trace if isinstance(v, Accepted))
    if got.action == "build":
        assert all(v.rank in (BUILD, PTX) for v in got.trace if isinstance(v, Accepted))
