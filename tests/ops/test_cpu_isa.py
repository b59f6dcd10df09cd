"""Instruction sets: the finished library on lower CPUs under qemu, its disassembly, and the aarch64 levels."""

from __future__ import annotations

import math
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compare import assert_bits, assert_close
from deepspeed_ops.op_builder import loader
from raw import BF16, COMBINATIONS, F16, F32, FORMATS, Tensors, combination_id, copies, random_tensors, step_many
from reference import Hyper, adam

from deepspeed_ops.cpu_adam import simd_levels

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = Path(__file__).resolve().parent / "native"
H = Hyper(weight_decay=0.1)  # what native/library.cpp has written in
FLAGS = ["-O2", "-std=c++17", "-ffp-contract=off", "-fPIC"]
on_x86_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="not an x86-64 Linux host"
)
Tool = Callable[[str], str]


def run(*command: object, timeout: float = 120) -> str:
    words = [str(c) for c in command]
    done = subprocess.run(
        words, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(words)}\nexit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def part() -> Path:
    """The library that this process has loaded, as the store holds it."""
    loader.host_module("cpu_adam")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = set(re.findall(r"\s(/\S.*/cpu_adam\.[^/\n]*\.so)$", maps, re.MULTILINE))
    assert len(paths) == 1, f"one library is loaded once: {paths}"
    return Path(paths.pop())


def write(path: Path, tensors: Tensors, head: bytes = b"") -> Path:
    path.write_bytes(head + b"".join(x.view(torch.uint8).numpy().tobytes() for x in tensors))
    return path


def read(path: Path, like: Tensors) -> list[torch.Tensor]:
    data, found, at = bytearray(path.read_bytes()), [], 0
    for x in (like[0], like[2], like[3]):
        found.append(torch.frombuffer(data, dtype=x.dtype, count=x.numel(), offset=at))
        at += x.numel() * x.element_size()
    assert at == len(data)
    return found


def special(tensors: Tensors) -> Tensors:
    """The same with values at which conversions differ if they can."""
    for i, x in enumerate(tensors[:3]):
        for at, value in enumerate((6e-8, 1e-39, 65504.0, -0.0, 1e30, 65520.0)):
            x[7 * at + i] = value
    return tensors


# ---- the finished library on lower CPUs -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tvm_ffi.libinfo

    library = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    out = tmp_path_factory.mktemp("driver") / "library"  # linked to libtvm_ffi, which a part expects to be loaded
    includes = [f"-I{tvm_ffi.libinfo.find_include_path()}", f"-I{tvm_ffi.libinfo.find_dlpack_include_path()}"]
    link = ["-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}", "-ldl", "-pthread"]
    run("g++", *FLAGS, *includes, "-include", "string", NATIVE / "library.cpp", "-o", out, *link)
    return out


@on_x86_linux
@pytest.mark.parametrize(("cpu", "best"), [("Nehalem", "scalar"), ("Haswell", "avx2")])
def test_lower_cpus_choose_their_level(cpu: str, best: str, part: Path, driver: Path, tool: Tool) -> None:
    """Fault: SIGILL on a CPU that the build machine is newer than (DeepSpeed#1886, #5451)."""
    qemu = tool("qemu-x86_64")
    levels = run(qemu, "-cpu", cpu, driver, part, "--levels").split()[-1]
    assert levels.split(",")[0] == best and levels.split(",")[-1] == "scalar"


@on_x86_linux
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
@pytest.mark.parametrize(("cpu", "best"), [("Nehalem", "scalar"), ("Haswell", "avx2")])
def test_lower_cpus_give_the_bits_of_their_level(
    cpu: str,
    best: str,
    combination: tuple[torch.dtype, ...],
    part: Path,
    driver: Path,
    tool: Tool,
    rng: torch.Generator,
    tmp_path: Path,
) -> None:
    """Fault: as above, inside the arithmetic; or a level whose results depend on the CPU that runs it."""
    qemu = tool("qemu-x86_64")
    before = special(random_tensors(1031, combination, rng))
    formats = [FORMATS[d] for d in combination]
    given, result = write(tmp_path / "in", before), tmp_path / "out"
    said = run(qemu, "-cpu", cpu, driver, part, "", *formats, 1031, 2, given, result)
    assert said.split() == [best]
    native = copies(before)
    step_many([native], [3], H, best)
    for name, got, want in zip("pmv", read(result, before), (native[0], native[2], native[3]), strict=True):
        assert_bits(name, got, want)


@on_x86_linux
def test_a_level_that_the_cpu_lacks_is_refused_there(part: Path, driver: Path, tool: Tool, tmp_path: Path) -> None:
    """Fault: DS_SIMD=avx512 on a Haswell ends in SIGILL instead of an error."""
    done = subprocess.run(
        [
            tool("qemu-x86_64"),
            "-cpu",
            "Haswell",
            driver,
            part,
            "avx512",
            "0",
            "0",
            "0",
            "1",
            "1",
            "/dev/null",
            tmp_path / "o",
        ],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 23, done


@on_x86_linux
def test_wide_registers_only_inside_their_level(part: Path, tool: Tool) -> None:
    """Fault: one compiler flag or one shared inline function lets AVX into code that every CPU runs."""
    text = run(tool("objdump"), "-d", "-C", "--no-show-raw-insn", part)
    where: dict[str, set[str]] = {"ymm": set(), "zmm": set(), "vex": set()}
    symbol = ""
    for line in text.splitlines():
        if found := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            symbol = found[1]
        elif found := re.match(r"\s+[0-9a-f]+:\s+(\S+)\s*(.*)", line):
            for register in ("ymm", "zmm"):
                if f"%{register}" in found[2]:
                    where[register].add(symbol)
            # A VEX-coded instruction on xmm registers faults just as well.
            if found[1].startswith("v") and "%xmm" in found[2]:
                where["vex"].add(symbol)
    assert any("ds::avx512::" in s for s in where["zmm"]) and any("ds::avx2::" in s for s in where["ymm"])
    assert not [s for s in where["zmm"] if "ds::avx512::" not in s]
    outside = [s for s in where["ymm"] | where["vex"] if "ds::avx2::" not in s and "ds::avx512::" not in s]
    assert not outside


# ---- aarch64 ----------------------------------------------------------------------------------------------------


def hyper_bytes(h: Hyper, step: int) -> bytes:
    """``ds::Hyper``: ten floats."""
    bias1, bias2 = 1 - h.beta1**step, 1 - h.beta2**step
    decay, l2 = (h.lr * h.weight_decay, 0.0) if h.adamw else (0.0, h.weight_decay)
    values = (h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.lr / bias1, 1 / math.sqrt(bias2), decay, l2, 1.0)
    return struct.pack("10f", *values)


@pytest.fixture(scope="session")
def aarch64_levels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    out = tmp_path_factory.mktemp("aarch64") / "levels"

    def build(compiler: str) -> Path:
        if not out.exists():
            sources = [ROOT / "csrc" / "cpu_adam" / "cpu_adam_levels.cpp", NATIVE / "levels.cpp"]
            run(compiler, *FLAGS, "-O3", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", *sources, "-o", out)
        return out

    return build


@pytest.fixture
def on_aarch64(tool: Tool, aarch64_levels: Callable[[str], Path]) -> Callable[..., str]:
    """Runs native/levels.cpp, compiled for aarch64."""
    compiler, qemu = tool("aarch64-linux-gnu-g++"), tool("qemu-aarch64")
    program = aarch64_levels(compiler)
    return lambda *args: run(qemu, "-L", "/usr/aarch64-linux-gnu", program, *args)


def test_aarch64_has_neon_first(on_aarch64: Callable[..., str]) -> None:
    """Fault: every ARM machine runs the scalar level and nobody notices."""
    assert on_aarch64("--supported").strip() == "neon,scalar"


@pytest.mark.parametrize("level", ["neon", "scalar"])
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combination_id)
def test_aarch64_levels(
    combination: tuple[torch.dtype, ...],
    adamw: bool,
    level: str,
    on_aarch64: Callable[..., str],
    rng: torch.Generator,
    tmp_path: Path,
) -> None:
    """Fault: an ARM level that was compiled and never run. Float64 judges; AVX2, which has fma, gives equal bits."""
    h = Hyper(weight_decay=0.1, adamw=adamw)
    n = 1031
    before = special(random_tensors(n, combination, rng))
    given = write(tmp_path / "in", before, hyper_bytes(h, 3))
    on_aarch64(level, *(FORMATS[d] for d in combination), n, given, tmp_path / "out")
    got = read(tmp_path / "out", before)
    ref = adam(*before, 3, h)
    finite = ref.v < 3e38
    for name, x in zip("pmv", got, strict=True):
        assert_close(name, x[finite], getattr(ref, name)[finite], getattr(ref, name + "_scale")[finite])
    if "avx2" in simd_levels():
        wide = copies(before)
        step_many([wide], [3], h, "avx2")
        for name, x, want in zip("pmv", got, (wide[0], wide[2], wide[3]), strict=True):
            assert_bits(name, x, want, any_nan=True)


@pytest.mark.parametrize("level", ["neon", "scalar"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_aarch64_conversions(dtype: torch.dtype, level: str, on_aarch64: Callable[..., str], tmp_path: Path) -> None:
    """Fault: NEON rounds or denormalises another way. Every pattern is read, every rounding boundary is stored."""
    from test_conversions import COPY, patterns, rounding_boundaries

    g = patterns(dtype)
    n = g.numel()
    before = (torch.zeros(n), g, torch.zeros(n), torch.zeros(n))
    given = write(tmp_path / "in", before, hyper_bytes(COPY, 1))
    on_aarch64(level, 0, FORMATS[dtype], 0, n, given, tmp_path / "out")
    m = read(tmp_path / "out", before)[1]
    want = g.float()
    assert torch.equal(m.isnan(), want.isnan()) and torch.equal(m[~want.isnan()], want[~want.isnan()])

    values = rounding_boundaries(dtype)
    values = values[values != 0]
    n = values.numel()
    zeros = torch.zeros(n, dtype=dtype)
    before = (zeros, values, zeros, zeros)
    given = write(tmp_path / "in", before, hyper_bytes(COPY, 1))
    on_aarch64(level, FORMATS[dtype], FORMATS[F32], FORMATS[dtype], n, given, tmp_path / "out")
    assert_bits("m", read(tmp_path / "out", before)[1], values.to(dtype))
