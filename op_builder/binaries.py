"""Machine and imported libraries of Windows DLLs (PE32+) and macOS dylibs (Mach-O 64), as much as a manifest needs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CorruptPart

_PE_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64", 0x14C: "i386"}
_MACHO_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
# LC_LOAD_DYLIB, its weak, re-export and upward forms (the high bit: the loader must know the command).
_LOAD_DYLIB = {0xC, 0x80000018, 0x8000001F, 0x80000023}


@dataclass(frozen=True)
class BinaryFacts:
    """Machine (``x86_64``, ``aarch64``), imported libraries in the order of the file, exported names (PE only)."""

    machine: str
    needed: tuple[str, ...]
    exports: tuple[str, ...] = ()


class _Bytes:
    def __init__(self, source: Path | bytes) -> None:
        self.what = "the file" if isinstance(source, bytes) else str(source)
        try:
            self.data = source if isinstance(source, bytes) else source.read_bytes()
        except OSError as exc:
            raise CorruptPart(f"cannot read {self.what}", str(exc), "build the part again") from exc

    def corrupt(self, why: str) -> CorruptPart:
        return CorruptPart(f"{self.what} is damaged", why, "build the part again")

    def unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        if offset < 0 or offset + size > len(self.data):
            raise self.corrupt(f"{size} bytes at offset {offset} lie beyond its end ({len(self.data)} bytes)")
        return struct.unpack_from(layout, self.data, offset)

    def string(self, offset: int) -> str:
        end = self.data.find(b"\0", offset) if 0 <= offset < len(self.data) else -1
        if end < 0:
            raise self.corrupt(f"no string ends after offset {offset}")
        return self.data[offset:end].decode("utf-8", "replace")


def read_pe(source: Path | bytes) -> BinaryFacts:
    """Facts of a 64-bit Windows DLL.

    Raises:
        CorruptPart: unreadable, cut short, or no PE32+ file.
    """
    file = _Bytes(source)
    if file.data[:2] != b"MZ":
        raise file.corrupt("it is no Windows library: it does not begin with MZ")
    (header,) = file.unpack("<I", 0x3C)
    if file.data[header : header + 4] != b"PE\0\0":
        raise file.corrupt("it has no PE header")
    machine, count, _, _, _, optional_size, _ = file.unpack("<HHIIIHH", header + 4)
    optional = header + 24
    if file.unpack("<H", optional)[0] != 0x20B:
        raise file.corrupt("it is not 64-bit (PE32+)")
    sections = [file.unpack("<IIII", optional + optional_size + i * 40 + 8) for i in range(count)]

    def offset(address: int) -> int:
        for size, start, raw_size, raw in sections:
            if start <= address < start + max(size, raw_size):
                return address - start + raw
        raise file.corrupt(f"address {address:#x} is in no section")

    (tables,) = file.unpack("<I", optional + 108)
    exported = file.unpack("<I", optional + 112)[0] if tables else 0
    exports = list(_exports(file, offset, offset(exported))) if exported else []
    imports = file.unpack("<I", optional + 120)[0] if tables > 1 else 0
    needed: list[str] = []
    at = offset(imports) if imports else -1
    while at >= 0:
        lookup, _, _, name, thunk = file.unpack("<IIIII", at)
        if not (lookup or name or thunk):
            break
        needed.append(file.string(offset(name)))
        at += 20
    return BinaryFacts(_PE_MACHINES.get(machine, f"pe-{machine:#x}"), tuple(needed), tuple(exports))


def _exports(file: _Bytes, offset: Callable[[int], int], at: int) -> Iterator[str]:
    """Names in the export directory at a file offset."""
    count, names = file.unpack("<I", at + 24)[0], file.unpack("<I", at + 32)[0]
    if count * 4 > len(file.data):
        raise file.corrupt(f"it says that it exports {count} names")
    for i in range(count):
        yield file.string(offset(file.unpack("<I", offset(names) + i * 4)[0]))


def read_macho(source: Path | bytes) -> BinaryFacts:
    """Facts of a 64-bit macOS library of one architecture.

    Raises:
        CorruptPart: unreadable, cut short, or no such file.
    """
    file = _Bytes(source)
    if file.data[:4] != b"\xcf\xfa\xed\xfe":
        raise file.corrupt("it is no 64-bit Mach-O file")
    _, machine, _, _, count, _, _, _ = file.unpack("<IIIIIIII", 0)
    needed: list[str] = []
    at = 32
    for _ in range(count):
        command, size = file.unpack("<II", at)
        if size < 8:
            raise file.corrupt(f"a load command of {size} bytes")
        if command in _LOAD_DYLIB:
            needed.append(file.string(at + file.unpack("<I", at + 8)[0]))
        at += size
    return BinaryFacts(_MACHO_MACHINES.get(machine, f"macho-{machine:#x}"), tuple(needed))
