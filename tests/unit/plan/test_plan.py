"""Guards against plans that depend on the machine's paths, on the order of inputs, or on too little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from op_builder.choose import choose_device_compiler
from op_builder.errors import CompilerMissing, UsageError
from op_builder.host import HostFacts
from op_builder.ninja_file import host_steps, ninja_text
from op_builder.plan import PartPlan, package_version, plan, plan_device, plan_host
from op_builder.settings import Settings
from op_builder.sources import Source, ffi_abi, find_headers, source_digest
from op_builder.targets import Target
from op_builder.toolchain import FFI, HostCompiler, Nvcc, Nvrtc, Problem, Toolchain
from tests.toys import toy_home, toy_spec

LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36))
GXX = HostCompiler("gcc", Path("/usr/bin/g++"), (12, 2, 0), "x86_64-linux-gnu", "g++ 12.2.0", ("/usr/bin/g++",))
TVM = FFI((Path("/ffi/include"),), Path("/ffi/lib"), Path("/ffi/lib/libtvm_ffi.so"), "0.1.15")
TOOLS = Toolchain(GXX, Path("/usr/bin/ninja"), ffi=TVM)
SPEC = toy_spec(device=["toy/toy.cu"])
SM = tuple(Target(*c) for c in ((7, 5), (8, 6), (9, 0)))
NVRTC = Nvrtc(Path("/n/libnvrtc.so.12"), None, (12, 1), SM, "pypi")


def host_plan(home: Path, **changes: Any) -> PartPlan:
    given: dict[str, Any] = {"spec": SPEC, "toolchain": TOOLS, "settings": Settings.read({}), "host": LINUX}
    given |= {"csrc": home / "csrc", "version": "1.2.3", **changes}
    return plan_host(**given)


def test_equal_inputs_in_two_places_give_equal_keys(tmp_path: Path) -> None:
    """Fault (foreign binary): two environments cannot share a store because a path is part of the key."""
    one = host_plan(toy_home(tmp_path / "one"))
    elsewhere = dataclasses.replace(TVM, include=(Path("/other/include"),), lib=Path("/other/lib"))
    moved = dataclasses.replace(GXX, path=Path("/opt/g++"), argv=("/opt/g++",))
    tools = dataclasses.replace(TOOLS, host=moved, ffi=elsewhere)
    two = host_plan(toy_home(tmp_path / "a b"), toolchain=tools)
    assert (one.key, one.source_digest) == (two.key, two.source_digest)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("source", lambda home: (home / "csrc/toy/toy.cpp").write_text("int x;", encoding="utf-8") and {}),
        ("header", lambda home: (home / "csrc/toy/answer.h").write_text("#define A 1", encoding="utf-8") and {}),
        ("compiler", lambda _: {"toolchain": dataclasses.replace(TOOLS, host=dataclasses.replace(GXX, identity="x"))}),
        ("flags", lambda _: {"settings": Settings.read({"CXXFLAGS": "-g"})}),
        ("link flags", lambda _: {"settings": Settings.read({"LDFLAGS": "-g"})}),
        ("platform", lambda _: {"host": HostFacts("linux", "aarch64", "glibc", (2, 36))}),
        ("C library", lambda _: {"host": HostFacts("linux", "x86_64", "musl")}),
        ("ABI", lambda _: {"toolchain": dataclasses.replace(TOOLS, ffi=dataclasses.replace(TVM, version="0.2.0"))}),
        ("package", lambda _: {"version": "1.2.4"}),
    ],
)
def test_whatever_changes_the_library_changes_its_key(
    tmp_path: Path, what: str, change: Callable[[Path], dict[str, Any]]
) -> None:
    """Fault (foreign binary): a library of other sources, flags or tools is taken for this one."""
    home = toy_home(tmp_path)
    before = host_plan(home)
    after = host_plan(home, **change(home))
    assert before.key != after.key, what
    stale = what in ("source", "header", "ABI")
    assert (before.source_digest != after.source_digest) == stale


def test_whatever_changes_a_gpu_part_changes_its_key(tmp_path: Path) -> None:
    """Fault (foreign binary): a GPU part of another release, target or source is taken for this one."""
    home = toy_home(tmp_path)

    def key(target: Target = SM[0], compiler: Nvrtc = NVRTC, version: str = "1") -> str:
        return plan_device(SPEC, target, compiler, home / "csrc", version).key

    first = key()
    newer = dataclasses.replace(NVRTC, version=(12, 8))
    keys = [first, key(SM[1]), key(Target(7, 5, "ptx")), key(compiler=newer), key(version="2")]
    (home / "csrc/toy/scale.cuh").write_text("// changed", encoding="utf-8")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_prebuilt_part_is_not_stale_elsewhere(tmp_path: Path) -> None:
    """Fault: the digest that the loader compares depends on the compiler, on line ends or on unrelated files."""
    home = toy_home(tmp_path)
    planned = host_plan(home)
    (home / "csrc/other.h").write_text("// nobody includes this", encoding="utf-8")
    source = home / "csrc/toy/toy.cpp"
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    assert source_digest(SPEC, "host", home / "csrc", ffi_abi("0.1.1")) == planned.source_digest
    assert (
        source_digest(SPEC, "device", home / "csrc", "")
        == plan_device(SPEC, SM[0], NVRTC, home / "csrc", "1").source_digest
    )


def test_no_flag_binds_to_this_machine(tmp_path: Path) -> None:
    """Fault: -march=native, fast math, or a RUNPATH to the build machine."""
    part = host_plan(toy_home(tmp_path))
    words = [w for step in host_steps(part, Path("out.so")) for w in step.argv]
    assert not [w for w in words if "march" in w or "fast-math" in w or "rpath" in w]
    assert "-ffp-contract=off" in words and "-Wl,-z,defs" in words and "-ltvm_ffi" in words
    assert not [w for w in words if "cuda" in w.lower() or "torch" in w.lower()]


def test_targets_come_in_numeric_order_and_once(tmp_path: Path) -> None:
    """Fault: the order of TORCH_CUDA_ARCH_LIST changes what is built."""
    tools = dataclasses.replace(TOOLS, nvrtc=(NVRTC,))
    shuffled = (SM[2], SM[0], SM[1], SM[0])
    got = plan(SPEC, tools, shuffled, Settings.read({}), LINUX, home=toy_home(tmp_path))
    assert [p.variant for p in got.parts] == ["linux-x86_64", "sm75", "sm86", "sm90"]
    assert got.parts[2].log_line == "toy sm86: nvrtc 12.1 -gencode=arch=compute_86,code=sm_86"
    assert [p.filename for p in got.parts[:2]] == ["toy.linux-x86_64.so", "toy.sm75.cubin"]


def test_no_compiler_says_what_is_missing(tmp_path: Path) -> None:
    """Fault: AttributeError on None, or "hardware/software issue"."""
    bare = Toolchain(problems=(Problem("no C++ compiler was found", "PATH has none", "apt-get install g++"),))
    with pytest.raises(CompilerMissing) as err:
        host_plan(toy_home(tmp_path), toolchain=bare)
    assert "toy" in err.value.what and "PATH has none" in err.value.why and err.value.fix == "apt-get install g++"


# --- headers ------------------------------------------------------------------------------------------------------


def scan(root: Path, **files: str) -> list[str]:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_h", ".h").replace("_cpp", ".cpp")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(find_headers(root, [Source("a/m.cpp", root / "a/m.cpp")]))


def test_headers_are_followed_through_headers_and_macros(tmp_path: Path) -> None:
    """Fault: an edited header that is included indirectly, or through a macro, leaves a stale part in use."""
    got = scan(
        tmp_path,
        a__m_cpp='#define BODY "a/body.h"\n #  include "c/x.h"\n#include "near.h"\n#include <c/system.h>\n'
        '#include "absent.h"\n',
        a__near_h="",
        a__body_h="",
        c__x_h='#include BODY\n#include "c/y.h"\n',
        c__y_h='#include "c/x.h"\n',
        c__system_h="",
    )
    assert got == ["a/body.h", "c/x.h", "c/y.h", "near.h"]


def test_a_macro_that_stands_for_no_file_is_refused(tmp_path: Path) -> None:
    """Fault: an include that cannot be followed is not part of the digest."""
    with pytest.raises(UsageError, match="BODY"):
        scan(tmp_path, a__m_cpp="#include BODY\n")


def test_one_spelling_for_two_files_is_refused(tmp_path: Path) -> None:
    """Fault: NVRTC, which knows headers by name, gets the wrong one."""
    with pytest.raises(UsageError, match="means"):
        scan(tmp_path, a__m_cpp='#include "x.h"\n#include "b/y.h"\n', a__x_h="", b__x_h="", b__y_h='#include "x.h"\n')


def test_a_header_outside_csrc_is_not_ours(tmp_path: Path) -> None:
    """Fault: a file of the machine becomes part of the digest."""
    (tmp_path / "outside.h").write_text("", encoding="utf-8")
    assert scan(tmp_path / "csrc", a__m_cpp='#include "../../outside.h"\n') == []


# --- choosing a GPU compiler --------------------------------------------------------------------------------------


def nvcc(release: tuple[int, int], *archs: Target) -> Nvcc:
    return Nvcc(Path("/cu/bin/nvcc"), Path("/cu"), release, archs, f"nvcc {release[0]}.{release[1]}")


def test_the_newest_compiler_that_knows_the_target_is_taken() -> None:
    """Fault: a compiler that refuses the target; or nvcc, which needs a host compiler, where NVRTC would do."""
    old, new = dataclasses.replace(NVRTC, version=(12, 1)), dataclasses.replace(NVRTC, version=(12, 8))
    tools = Toolchain(nvrtc=(old, new), nvcc=(nvcc((12, 8), *SM), nvcc((13, 0), Target(7, 5), Target(9, 0))))
    assert choose_device_compiler(Target(8, 6), tools) == new
    assert choose_device_compiler(Target(9, 0), tools) == tools.nvcc[1]
    assert choose_device_compiler(Target(9, 0), tools, driver_cuda=(12, 4)) == new
    assert choose_device_compiler(Target(9, 0), tools, release=(12, 1)) == old


def test_no_fitting_compiler_names_what_is_here_and_what_to_install() -> None:
    """Fault (arch dropped by CUDA 13): nvcc's own late error, without the cure."""
    with pytest.raises(CompilerMissing) as err:
        choose_device_compiler(Target(6, 1), Toolchain(nvcc=(nvcc((13, 0), *SM),)))
    assert "sm_61" in err.value.what and "nvcc 13.0 knows sm_75, sm_86, sm_90" in err.value.why
    assert err.value.fix == "pip install nvidia-cuda-nvrtc-cu12==12.1.105"


# --- ninja --------------------------------------------------------------------------------------------------------


def test_no_two_sources_share_an_object(tmp_path: Path) -> None:
    """Fault (object names collide): the second object overwrites the first."""
    names = ["x/toy.cpp", "y/toy.cpp", "x_toy.cpp", "x/toy_cpp", "X/toy.cpp"]
    for name in names:
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    part = host_plan(tmp_path, spec=toy_spec(host=names))
    outputs = [step.output.lower() for step in host_steps(part, Path("out.so"))]
    assert len(set(outputs)) == len(names) + 1


def test_hostile_paths_survive_ninja(tmp_path: Path) -> None:
    """Fault (quoting): a blank, ``$`` or ``:`` splits a path or expands a variable."""
    home = toy_home(tmp_path / "a b$x:c'd\"e")
    part = host_plan(home)
    text = ninja_text(host_steps(part, home / "out.so"), windows=False)
    assert "a$ b$$x$:c'd\"e" in text
    assert "\n  cmd = /usr/bin/g++ " in text


def test_a_version_is_public_and_read_where_it_lies(tmp_path: Path) -> None:
    """Fault: every commit of a checkout throws the whole store away; an installed wheel has another key."""
    assert package_version(tmp_path) == "0"
    (tmp_path / "version.json").write_text('{"version": "1.2.3+abc"}', encoding="utf-8")
    assert package_version(tmp_path) == "1.2.3"
    (tmp_path / "version.txt").write_text("1.2.4\n", encoding="utf-8")
    assert package_version(tmp_path) == "1.2.4"


def test_an_ffi_without_a_version_is_refused() -> None:
    """Fault: an unknown ABI taken for a known one."""
    assert ffi_abi("0.1.15.post2") == "tvm-ffi 0.1"
    with pytest.raises(UsageError):
        ffi_abi("")
