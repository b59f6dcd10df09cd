"""The package for 64-bit ARM, cross-compiled here: its libraries loaded and its arithmetic run under qemu-aarch64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tvm_ffi
from conda_channel import solve
from conda_channel.place import BUILD_PLATFORM, CROSS_PLATFORM, Place
from conftest import ROOT

from op_builder import matrix
from op_builder.elf import read_elf
from op_builder.spec import all_specs

CALLERS = ROOT / "tests" / "windows"
ROOTFS = Path("/usr/aarch64-linux-gnu")
OPS = [name for name, spec in all_specs().items() if spec.host]
OLDEST = f"{matrix.load().ffi_package} =={matrix.load().ffi_minimum}"  # what the stand-ins have for ARM
CALLED = [op for op in OPS if all_specs()[op].simd]


def run(*words: str | Path) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def compile_caller(name: str, compiler: str, out: Path) -> Path:
    """A program that calls an op's library through the C ABI."""
    headers = Path(tvm_ffi.__file__).parent
    include = [f"-I{ROOT / 'csrc'}", f"-I{headers / 'include'}", f"-I{headers / '3rdparty/dlpack/include'}"]
    run(compiler, "-O1", "-std=c++17", "-ffp-contract=off", *include, CALLERS / f"{name}.cpp", "-o", out, "-ldl")
    return out


@pytest.fixture(scope="module")
def arm(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ARM machine's environment with the host libraries."""
    prefix = tmp_path_factory.mktemp("arm") / "env"
    found = solve.solve(place, solve.Machine("ARM", CROSS_PLATFORM), ["deepspeed-ops-host", OLDEST])
    solve.install(place, found, prefix, CROSS_PLATFORM)
    return prefix


def library(prefix: Path, op: str) -> Path:
    """An op's host library."""
    (found,) = (prefix / "share" / "deepspeed-ops" / op).glob("linux-*/*.so")
    return found


def runtime(prefix: Path) -> Path:
    """libtvm_ffi of an environment."""
    (found,) = prefix.glob("lib/python3*/site-packages/tvm_ffi/lib/libtvm_ffi.so")
    return found


@pytest.mark.parametrize("op", OPS)
def test_every_library_loads(op: str, arm: Path, tmp_path: Path) -> None:
    """Fault: a library of the wrong machine, or one with a symbol that nothing there provides."""
    assert read_elf(library(arm, op)).machine == "aarch64"
    loader = compile_caller("load_op", "aarch64-linux-gnu-g++", tmp_path / "load")
    functions = exported(library(arm, op))
    said = run("qemu-aarch64", "-L", ROOTFS, loader, runtime(arm), library(arm, op), *functions)
    assert said.split() == functions != []


def exported(path: Path) -> list[str]:
    """Names of the FFI functions that a library offers."""
    said = run("aarch64-linux-gnu-nm", "-D", "--defined-only", path)
    return [line.split("__tvm_ffi_")[1] for line in said.splitlines() if "__tvm_ffi_" in line]


@pytest.mark.parametrize("op", CALLED)
def test_neon_and_scalar_give_the_bits_of_x86(op: str, arm: Path, place: Place, tmp_path: Path) -> None:
    """Fault: arithmetic that differs between machines, tails that a vector loop forgets, writes past the end."""
    here, x86 = tmp_path / "here", solve.Machine("x86", BUILD_PLATFORM)
    solve.install(place, solve.solve(place, x86, ["deepspeed-ops-host", OLDEST]), here)
    caller = compile_caller(f"call_{op}", "aarch64-linux-gnu-g++", tmp_path / "arm")
    own = compile_caller(f"call_{op}", "g++", tmp_path / "x86")
    there = by_level(run("qemu-aarch64", "-L", ROOTFS, caller, runtime(arm), library(arm, op)))
    mine = by_level(run(own, runtime(here), library(here, op)))
    assert set(there) == {"neon", "scalar"}
    assert len(there["neon"]) == 63
    for level in there.values():
        assert level == mine["avx2"]  # the level here that rounds a multiply-add once, as every ARM level does


def by_level(text: str) -> dict[str, list[str]]:
    """The caller's lines by SIMD level."""
    levels: dict[str, list[str]] = {}
    for line in text.splitlines():
        level, _, rest = line.partition(" ")
        if level not in ("levels", "refused"):
            levels.setdefault(level, []).append(rest)
    return levels


def test_qemu_and_the_cross_compiler_are_here() -> None:
    """Fault: every test above is skipped and nobody notices."""
    assert shutil.which("qemu-aarch64") and shutil.which("aarch64-linux-gnu-g++")
