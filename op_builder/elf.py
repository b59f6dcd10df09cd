"""Reading ELF64 files with nothing but the standard library: host libraries here, cubins in :mod:`.cubin`.

A file of a store may be cut short or be something else entirely; whatever does not fit is a :class:`CorruptPart`,
never an exception of ``struct`` or an endless loop.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CorruptPart

MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 21: "ppc64le", 22: "s390x", 243: "riscv64", 190: "cuda"}
EM_CUDA = 190

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
_SHT_DYNSYM, SHT_SYMTAB, _SHT_NOBITS = 11, 2, 8


@dataclass(frozen=True)
class Section:
    """One section header: name, type, place in the file, size, entry size, link and info fields."""

    name: str
    type: int
    offset: int
    size: int
    entry_size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """One symbol: name, type and binding (low and high half of ``info``), ``other`` byte, section index."""

    name: str
    info: int
    other: int
    section: int

    @property
    def is_function(self) -> bool:
        """Type ``STT_FUNC``."""
        return self.info & 0xF == 2


class ElfImage:
    """The bytes of an ELF64 little-endian file with bounds checks."""

    def __init__(self, data: bytes, what: str = "file") -> None:
        self.data, self.what = data, what
        if data[:4] != b"\x7fELF":
            raise CorruptPart(f"{what} is no ELF file", f"it begins with {data[:4]!r}", "build the part again")
        if data[4:6] != b"\x02\x01":
            raise self.corrupt("it is not 64-bit little-endian")
        header = self.unpack("<HHIQQQIHHHHHH", 16)
        self.osabi, self.abi_version = data[7], data[8]
        self.type, self.machine, _, self.entry, self._phoff, self._shoff, self.flags = header[:7]
        self._phentsize, self._phnum, self._shentsize, self._shnum, self._shstrndx = header[8:]

    def corrupt(self, why: str) -> CorruptPart:
        """The error for a file that contradicts itself."""
        return CorruptPart(f"{self.what} is damaged", why, "build the part again")

    def unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        """``struct.unpack_from`` that knows where the file ends."""
        size = struct.calcsize(layout)
        if offset < 0 or offset + size > len(self.data):
            raise self.corrupt(f"{size} bytes at offset {offset} lie beyond its end ({len(self.data)} bytes)")
        return struct.unpack_from(layout, self.data, offset)

    def piece(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``."""
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise self.corrupt(f"{size} bytes at offset {offset} lie beyond its end ({len(self.data)} bytes)")
        return self.data[offset : offset + size]

    def string(self, offset: int) -> str:
        """The zero-terminated string at ``offset``."""
        end = self.data.find(b"\0", offset) if 0 <= offset < len(self.data) else -1
        if end < 0:
            raise self.corrupt(f"no string ends after offset {offset}")
        return self.data[offset:end].decode("utf-8", "replace")

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """All sections; ``()`` for a file stripped of them."""
        if not self._shoff or not self._shnum:
            return ()
        if self._shentsize < 64:
            raise self.corrupt(f"a section header of {self._shentsize} bytes")
        raw = [self.unpack("<IIQQQQIIQQ", self._shoff + i * self._shentsize) for i in range(self._shnum)]
        if self._shstrndx >= len(raw):
            raise self.corrupt("its section names are missing")
        names = raw[self._shstrndx][4]
        return tuple(Section(self.string(names + r[0]), r[1], r[4], r[5], r[9], r[6], r[7]) for r in raw)

    def section(self, name: str) -> bytes | None:
        """Contents of the first section of that name."""
        for found in self.sections:
            if found.name == name:
                return b"" if found.type == _SHT_NOBITS else self.piece(found.offset, found.size)
        return None

    def symbols(self, kind: int = SHT_SYMTAB) -> Iterator[Symbol]:
        """Symbols of the table of that section type."""
        for table in self.sections:
            if table.type != kind:
                continue
            if table.link >= len(self.sections):
                raise self.corrupt("a symbol table has no strings")
            names = self.sections[table.link].offset
            self.piece(table.offset, table.size)
            for at in range(table.offset, table.offset + table.size - 23, 24):
                name, info, other, section = self.unpack("<IBBH", at)
                yield Symbol(self.string(names + name), info, other, section)

    def check_whole(self) -> None:
        """Every section and segment lies within the file: one that was cut keeps its first header."""
        for section in self.sections:
            if section.type not in (0, _SHT_NOBITS):
                self.piece(section.offset, section.size)
        for offset, _, size in self.segments(None):
            self.piece(offset, size)

    def segments(self, kind: int | None) -> Iterator[tuple[int, int, int]]:
        """``(file offset, virtual address, size in the file)`` of the program headers of that type, None: of all."""
        for index in range(self._phnum):
            if self._phentsize < 56:
                raise self.corrupt(f"a program header of {self._phentsize} bytes")
            head = self.unpack("<IIQQQQQQ", self._phoff + index * self._phentsize)
            if kind is None or head[0] == kind:
                yield head[2], head[3], head[5]

    def offset_of(self, address: int) -> int:
        """Place in the file of a virtual address."""
        for offset, start, size in self.segments(_PT_LOAD):
            if start <= address < start + size:
                return address - start + offset
        raise self.corrupt(f"address {address:#x} is in no segment")

    @functools.cached_property
    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """Tags and values of the dynamic section."""
        out: list[tuple[int, int]] = []
        for offset, _, size in self.segments(_PT_DYNAMIC):
            self.piece(offset, size)
            for at in range(offset, offset + size - 15, 16):
                tag, value = self.unpack("<QQ", at)
                if tag == 0:
                    break
                out.append((tag, value))
        return tuple(out)


@dataclass(frozen=True)
class ElfFacts:
    """What a host library needs and offers.

    Attributes:
        machine: ``x86_64``, ``aarch64``, ... (``em-N`` for others).
        soname: its own name, ``""`` without one.
        needed: libraries it loads, in link order.
        runpath: entries of RUNPATH and RPATH.
        version_needs: ``(library, symbol version)`` pairs, such as ``("libc.so.6", "GLIBC_2.17")``.
        exports: names of the functions and objects it offers.
    """

    machine: str
    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    version_needs: tuple[tuple[str, str], ...]
    exports: tuple[str, ...]

    @property
    def glibc(self) -> tuple[int, int] | None:
        """The lowest glibc that loads it, None where it needs none."""
        versions = [v for v in (_version(name, "GLIBC_") for _, name in self.version_needs) if v]
        if any(name == "GLIBC_ABI_DT_RELR" for _, name in self.version_needs):
            versions.append((2, 36))  # packed relocations: the dynamic loader learned them in that release
        return max((v[0], v[1]) for v in versions) if versions else None

    @property
    def glibcxx(self) -> tuple[int, ...] | None:
        """The highest ``GLIBCXX_`` version it asks of libstdc++."""
        return max((v for v in (_version(n, "GLIBCXX_") for _, n in self.version_needs) if v), default=None)


def _version(name: str, prefix: str) -> tuple[int, ...] | None:
    match = re.fullmatch(re.escape(prefix) + r"(\d+(?:\.\d+)+)", name)
    return tuple(int(p) for p in match[1].split(".")) if match else None


def read_elf(source: Path | bytes) -> ElfFacts:
    """Facts of an ELF host library.

    Args:
        source: the file, or its bytes.

    Raises:
        CorruptPart: unreadable, cut short, no ELF64 file, or a cubin.
    """
    image = ElfImage(*_load(source))
    if image.machine == EM_CUDA:
        raise image.corrupt("it holds GPU code, not a host library")
    image.check_whole()
    strings = next((image.offset_of(v) for t, v in image.dynamic if t == _DT_STRTAB), None)

    def text(tag: int) -> tuple[str, ...]:
        if strings is None:
            return ()
        return tuple(image.string(strings + value) for found, value in image.dynamic if found == tag)

    paths = [entry for joined in (*text(_DT_RPATH), *text(_DT_RUNPATH)) for entry in joined.split(":") if entry]
    exports = {s.name for s in image.symbols(_SHT_DYNSYM) if s.section and s.name and s.info >> 4 in (1, 2, 10)}
    return ElfFacts(
        machine=MACHINES.get(image.machine, f"em-{image.machine}"),
        soname=next(iter(text(_DT_SONAME)), ""),
        needed=text(_DT_NEEDED),
        runpath=tuple(paths),
        version_needs=tuple(_version_needs(image, strings)) if strings is not None else (),
        exports=tuple(sorted(exports)),
    )


def _load(source: Path | bytes) -> tuple[bytes, str]:
    if isinstance(source, bytes):
        return source, "the file"
    try:
        return source.read_bytes(), str(source)
    except OSError as exc:
        raise CorruptPart(f"cannot read {source}", str(exc), "build the part again") from exc


def _version_needs(image: ElfImage, strings: int) -> Iterator[tuple[str, str]]:
    tags = dict(image.dynamic)
    if _DT_VERNEED not in tags:
        return
    at = image.offset_of(tags[_DT_VERNEED])
    for _ in range(min(tags.get(_DT_VERNEEDNUM, 0), len(image.data) // 16)):
        _, count, library, first, after = image.unpack("<HHIII", at)
        entry = at + first
        for _ in range(count):
            _, _, _, name, step = image.unpack("<IHHII", entry)
            yield image.string(strings + library), image.string(strings + name)
            if step == 0:
                break
            entry += step
        if after == 0:
            return
        at += after
