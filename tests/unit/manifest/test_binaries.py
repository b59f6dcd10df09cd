"""Host libraries read by hand: ELF made here by the compiler, PE and Mach-O written byte by byte."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_builder.elf import ElfFacts
from op_builder.errors import CorruptPart
from op_builder.manifest import facts_as_fields, read_elf, read_macho, read_pe


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C++ compiler for ELF here")
    folder = tmp_path_factory.mktemp("elf")
    source = folder / "x.cpp"
    source.write_text(
        "#include <string>\n#include <cmath>\n"
        'extern "C" double offered(double x) { return std::pow(x, 1.5) + std::to_string(x).size(); }\n'
        'extern "C" __attribute__((visibility("hidden"))) int secret() { return 1; }\n'
        'extern "C" void wanted();\nextern "C" void calls() { wanted(); }\n',
        encoding="utf-8",
    )
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libx.so.3", "-Wl,-rpath,$ORIGIN/../lib:/opt/x"]
    out = folder / "libx.so"
    subprocess.run([compiler, *flags, str(source), "-o", str(out), "-lm"], check=True, timeout=60)
    return out


def test_elf(library: Path) -> None:
    """Fault: NEEDED, run path, exports or the glibc floor are guessed instead of read."""
    facts = read_elf(library)
    assert facts.soname == "libx.so.3" and facts.runpath == ("$ORIGIN/../lib", "/opt/x")
    assert {"libstdc++.so.6", "libc.so.6"} <= set(facts.needed)
    assert {"offered", "calls"} <= set(facts.exports)
    assert "secret" not in facts.exports and "wanted" not in facts.exports, "hidden and undefined names are no exports"
    assert facts.glibc is not None and (2, 2) <= facts.glibc < (3, 0)
    assert facts.glibcxx is not None and facts.glibcxx >= (3, 4)
    assert facts_as_fields(facts) == {"needed": facts.needed, "glibc": facts.glibc}


def test_elf_agrees_with_readelf(library: Path) -> None:
    """Fault: our reader and the system's tell different things about one file."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    asked = ["readelf", "-dVW", str(library)]
    text = subprocess.run(asked, capture_output=True, encoding="utf-8", check=True, timeout=60).stdout
    facts = read_elf(library)
    assert facts.needed == tuple(ln.split("[")[1].split("]")[0] for ln in text.splitlines() if "(NEEDED)" in ln)
    assert {name for _, name in facts.version_needs} == {
        ln.split("Name: ")[1].split()[0] for ln in text.splitlines() if "Name: " in ln and "Flags:" in ln
    }


def test_glibc_floor_rules() -> None:
    """Fault: 2.4 above 2.17 (text order), GLIBC_PRIVATE or packed relocations misread."""

    def floor(*names: str) -> tuple[int, int] | None:
        return ElfFacts("x86_64", "", (), (), tuple(("libc.so.6", n) for n in names), ()).glibc

    assert floor("GLIBC_2.4", "GLIBC_2.17", "GLIBC_2.2.5") == (2, 17)
    assert floor("GLIBC_PRIVATE", "GCC_3.0") is None
    assert floor("GLIBC_2.17", "GLIBC_ABI_DT_RELR") == (2, 36)


def test_cut_or_changed_elf(library: Path) -> None:
    """Fault: half a library ends in struct.error, or passes."""
    data = library.read_bytes()
    for size in (0, 3, 15, 63, 64, 500, len(data) // 2, len(data) - 1):
        with pytest.raises(CorruptPart):
            read_elf(data[:size])
    with pytest.raises(CorruptPart, match="no ELF"):
        read_elf(b"MZ" + data[2:])
    with pytest.raises(CorruptPart, match="64-bit"):
        read_elf(data[:4] + b"\x01" + data[5:])
    with pytest.raises(CorruptPart, match="cannot read"):
        read_elf(library.parent / "none.so")


def test_flipped_bytes(library: Path) -> None:
    """Fault: a flipped byte gives another exception, or an endless loop over version records."""
    data = library.read_bytes()
    for place in range(0, min(len(data), 6000), 7):
        for value in (0x00, 0xFF):
            changed = data[:place] + bytes([value]) + data[place + 1 :]
            try:
                assert isinstance(read_elf(changed).needed, tuple)
            except CorruptPart as error:
                assert error.why


@settings(max_examples=200)
@given(st.sampled_from([b"\x7fELF\x02\x01\x01", b"MZ", b"\xcf\xfa\xed\xfe", b""]), st.binary(max_size=400))
def test_garbage(head: bytes, data: bytes) -> None:
    """Fault: garbage with the right first bytes raises something else than CorruptPart."""
    for read in (read_elf, read_pe, read_macho):
        try:
            read(head + data)
        except CorruptPart as error:
            assert error.what


def pe(names: list[str], machine: int = 0x8664, magic: int = 0x20B) -> bytes:
    """A PE32+ file with one section at address 0x1000, file offset 0x400, holding the import table and names."""
    table, text = b"", b""
    strings = 20 * (len(names) + 1)
    for name in names:
        table += struct.pack("<IIIII", 1, 0, 0, 0x1000 + strings + len(text), 1)
        text += name.encode() + b"\0"
    body = table + bytes(20) + text
    optional = struct.pack("<H", magic) + bytes(106) + struct.pack("<IIIII", 16, 0, 0, 0x1000 if names else 0, 40)
    optional += bytes(240 - len(optional))
    header = b"PE\0\0" + struct.pack("<HHIIIHH", machine, 1, 0, 0, 0, len(optional), 0x2022)
    section = b".idata\0\0" + struct.pack("<IIII", len(body), 0x1000, len(body), 0x400) + bytes(16)
    file = b"MZ" + bytes(58) + struct.pack("<I", 0x40) + header + optional + section
    return file + bytes(0x400 - len(file)) + body


def test_pe() -> None:
    """Fault: a Windows part's dependencies are unknown until it fails to load there."""
    facts = read_pe(pe(["tvm_ffi.dll", "KERNEL32.dll", "VCRUNTIME140.dll"]))
    assert (facts.machine, facts.needed) == ("x86_64", ("tvm_ffi.dll", "KERNEL32.dll", "VCRUNTIME140.dll"))
    assert read_pe(pe([], machine=0xAA64)).machine == "aarch64" and read_pe(pe([])).needed == ()
    assert facts_as_fields(facts)["glibc"] is None


def test_pe_refusals(tmp_path: Path) -> None:
    """Fault: 32-bit or cut files pass."""
    whole = pe(["a.dll"])
    for broken in (whole[:100], whole[:0x410], pe(["a.dll"], magic=0x10B), b"ELF", b""):
        with pytest.raises(CorruptPart):
            read_pe(broken)
    with pytest.raises(CorruptPart, match="cannot read"):
        read_pe(tmp_path / "none.dll")


def macho(names: list[str], machine: int = 0x0100000C) -> bytes:
    """A 64-bit Mach-O header with one uuid command and one load command per library."""
    commands = struct.pack("<II", 0x1B, 24) + bytes(16)
    for name in names:
        text = name.encode() + b"\0"
        text += bytes(-len(text) % 8)
        commands += struct.pack("<IIIIII", 0xC, 24 + len(text), 24, 0, 0, 0) + text
    return struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, 6, 1 + len(names), len(commands), 0, 0) + commands


def test_macho() -> None:
    """Fault: a macOS part's dependencies are unknown until it fails to load there."""
    facts = read_macho(macho(["@rpath/libtvm_ffi.dylib", "/usr/lib/libc++.1.dylib"]))
    assert (facts.machine, facts.needed) == ("aarch64", ("@rpath/libtvm_ffi.dylib", "/usr/lib/libc++.1.dylib"))
    assert read_macho(macho([], machine=0x01000007)).machine == "x86_64"
    for broken in (macho(["a"])[:40], b"\xca\xfe\xba\xbe" + bytes(60), b""):
        with pytest.raises(CorruptPart):
            read_macho(broken)
