"""NVRTC for real: three releases in one process, machine code read back, errors a user can act on."""

from __future__ import annotations

import locale
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from op_builder.cubin import read_gpu
from op_builder.cuda_toolkits import Nvrtc, find_nvrtc
from op_builder.cuda_toolkits import nvrtc_folders as places
from op_builder.errors import ArchListError, CompileFailed, CompilerMissing
from op_builder.matrix import load
from op_builder.nvrtc import NvrtcFailed, first_error, open_nvrtc, target_of
from op_builder.targets import Target, ship_set

SOURCE = '#include "x.cuh"\nextern "C" __global__ void kernel(float *p, long n) { if (n > 0) p[0] = F(p[1]); }\n'
HEADERS = {"x.cuh": "#pragma once\n#define F(x) ((x) * 2)\n"}


def found_in(folders: dict[tuple[int, int], Path]) -> dict[tuple[int, int], Nvrtc]:
    nowhere = Path("/nonexistent")
    found = find_nvrtc(places({}, (), [str(f) for f in folders.values()], None, nowhere))
    return {n.version: n for n in found}


@pytest.fixture
def nvrtc(nvrtc_folders: Mapping[tuple[int, int], Path]) -> dict[tuple[int, int], Nvrtc]:
    """The oldest release, the first with Blackwell, and the newest one with torch wheels."""
    rows = load().cuda
    picked = {min(rows), load().oldest_release((10, 0)).release, max(r for r, row in rows.items() if row.torch)}
    return found_in({release: nvrtc_folders[release] for release in sorted(picked)})


def test_release_by_file_name_is_what_the_library_says(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: a key names another compiler release than the one that compiled; builtins of another release."""
    for release, one in nvrtc.items():
        library = open_nvrtc(one)
        assert library.version == release == one.version
        assert library.archs == one.archs, "the matrix and the compiler know the same architectures"
        assert one.builtins is not None and one.source == "pypi"
        assert open_nvrtc(one) is library


def test_every_shipped_target_is_compiled_by_its_release(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: PTX where machine code was asked for; the ship set asks a compiler for what it does not have."""
    for target, release in ship_set():
        image, log = open_nvrtc(nvrtc[release]).compile(
            SOURCE, "kernel.cu", HEADERS, ["--std=c++17", "--fmad=true", "-lineinfo"], target=target
        )
        facts = read_gpu(image)
        assert (facts.target, facts.kernels, log) == (target, ("kernel",), "")
        if target.kind == "ptx":
            assert facts.isa == load().ptx_isa(release) and not image.endswith(b"\0")


def test_target_among_the_options(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: the plan's own flag and the binding's disagree."""
    library = open_nvrtc(nvrtc[max(nvrtc)])
    image, _ = library.compile(SOURCE, "k.cu", HEADERS, ["--gpu-architecture=sm_90a"])
    assert read_gpu(image).target == Target(9, 0, "sass", "a")
    with pytest.raises(ArchListError, match="no GPU target"):
        library.compile(SOURCE, "k.cu", HEADERS, ["--fmad=true"])


def test_the_locale_survives(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: after a JIT build, every later open() without an encoding reads ASCII (NVRTC 12.1 leaves the C locale)."""
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        for one in nvrtc.values():
            open_nvrtc(one).compile(SOURCE, "k.cu", HEADERS, (), target=Target(8, 0))
            assert locale.nl_langinfo(locale.CODESET) == "UTF-8", one.version
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def test_equal_input_gives_equal_bytes(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: parts cannot be shared or compared digest for digest."""
    for one in nvrtc.values():
        images = {open_nvrtc(one).compile(SOURCE, "k.cu", HEADERS, (), target=Target(8, 0))[0] for _ in range(3)}
        assert len(images) == 1


def test_errors(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: "compilation error" without the compiler's own line; the process ends; a second try is poisoned."""
    library = open_nvrtc(nvrtc[min(nvrtc)])
    with pytest.raises(NvrtcFailed) as caught:
        library.compile('extern "C" __global__ void k() { y = 1; }', "bad.cu", {}, (), target=Target(8, 0))
    assert caught.value.why == 'bad.cu(1): error: identifier "y" is undefined' and isinstance(
        caught.value, CompileFailed
    )
    assert "1 error detected" in caught.value.output and "-arch=sm_80" in caught.value.what
    with pytest.raises(NvrtcFailed, match=r"x\.cuh"):
        library.compile(SOURCE, "k.cu", {}, (), target=Target(8, 0))
    with pytest.raises(NvrtcFailed) as missing:
        library.compile(SOURCE, "k.cu", HEADERS, (), target=Target(12, 0))
    assert "sm_90" in missing.value.why and "release" in missing.value.fix
    with pytest.raises(NvrtcFailed) as flag:
        library.compile(SOURCE, "k.cu", HEADERS, ["--no-such-flag"], target=Target(8, 0))
    assert "no-such-flag" in flag.value.what + flag.value.why
    assert library.compile(SOURCE, "k.cu", HEADERS, (), target=Target(8, 0))[0]


def test_the_library_in_use_comes_first(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: a second NVRTC of another release is loaded beside the one the process (torch) holds."""
    one = nvrtc[max(nvrtc)]
    code = (
        "import ctypes, os, sys\n"
        f"ctypes.CDLL({str(one.library)!r})\n"
        "from op_builder import host, settings, toolchain\n"
        "s = settings.Settings.read()\n"
        "found = toolchain.discover_gpu(s, host.detect(os.environ), paths=[]).nvrtc\n"
        "assert found[0].source == 'loaded', found\n"
        f"assert found[0].version == {one.version!r}, found\n"
        f"assert str(found[0].library) == {str(one.library)!r}, found\n"
    )
    if sys.platform != "linux":
        pytest.skip("the test reads /proc/self/maps")
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_looking_loads_nothing(nvrtc: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: looking for compilers loads an NVRTC, which then answers torch's own request for that library."""
    if sys.platform != "linux":
        pytest.skip("the test reads /proc/self/maps")
    folders = [str(n.library.parents[3]) for n in nvrtc.values()]
    code = (
        "import os, sys\n"
        "from op_builder import host, settings, toolchain\n"
        f"found = toolchain.discover_gpu(settings.Settings.read(), host.detect(os.environ), paths={folders!r}).nvrtc\n"
        f"assert len(found) >= {len(folders)}, found\n"
        "assert 'libnvrtc' not in open('/proc/self/maps').read()\n"
        "assert 'torch' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_damaged_library(tmp_path: Path) -> None:
    """Fault: OSError of ctypes without a way out."""
    library = tmp_path / "libnvrtc.so.12"
    library.write_bytes(b"\x7fELF\x02\x01\x01 cut")
    with pytest.raises(CompilerMissing) as caught:
        open_nvrtc(Nvrtc(library, None, (12, 1), (), "system"))
    assert str(library) in caught.value.what and "pip install" in caught.value.fix


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ('a.cu(3): warning #177-D: x\na.cu(7): error: no "y"\n1 error detected', 'a.cu(7): error: no "y"'),
        (
            "a.cuh(1): catastrophic error: cannot open source file",
            "a.cuh(1): catastrophic error: cannot open source file",
        ),
        (
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
        ),
        ("ptxas fatal   : Unresolved extern function 'f'", "ptxas fatal   : Unresolved extern function 'f'"),
        ("note: no error here\nError limit reached.", "note: no error here"),
        ("", ""),
    ],
)
def test_first_error_line(log: str, line: str) -> None:
    """Fault: a warning or the closing count shown as the cause."""
    assert first_error(log) == line


def test_target_of() -> None:
    """Fault: the last of two architecture flags is not the one that counts."""
    assert target_of(["-arch=sm_80", "--gpu-architecture=compute_100f"]).variant == "ptx100f"
