"""Reading back what a GPU part was really compiled for: cubins (ELF files of machine EM_CUDA) and PTX text.

The architecture sits in ``e_flags``, in two layouts:

* ABI version 7 (``sm_50`` ... ``sm_90`` by CUDA 12): number in bits 0-7, bit 11 set for ``a`` forms.
* ABI version 8 (``sm_100`` on by CUDA 12.8, everything by CUDA 13): number in bits 8-15; CUDA 12.8 and 12.9 set bit 3
  for ``a`` forms, CUDA 13 does not.

In ABI version 8 the note ``.note.nv.tkinfo`` holds the assembler's arguments, the only place that tells an ``f`` part
from a plain one; where both speak they must agree. Checked against cubins of CUDA 12.1 to 13.5.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from .elf import EM_CUDA, ElfImage
from .errors import CorruptPart
from .targets import Suffix, Target, capability_of

_STO_ENTRY = 0x10  # bit of a symbol's `other` byte: a __global__ function
_NOTE_TOOL = 2000
_COMPAT_ISA_CLASS = b"\x02\x09"  # record of .nv.compat: one-byte value, attribute 9; value 1: arch-specific code


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU part holds.

    Attributes:
        target: what it was compiled for, read from the file itself.
        kernels: names of its ``__global__`` functions, sorted.
        isa: PTX version, None for machine code.
        release: ``(13, 0)``, the release of the assembler, None where the file does not tell.
    """

    target: Target
    kernels: tuple[str, ...]
    isa: tuple[int, int] | None = None
    release: tuple[int, int] | None = None


def read_gpu(data: bytes, what: str = "GPU part") -> GpuFacts:
    """Facts of a cubin or of PTX, whichever the bytes are.

    Raises:
        CorruptPart: neither, cut short, or contradictory.
    """
    return read_cubin(data, what) if data[:4] == b"\x7fELF" else read_ptx(data, what)


def read_cubin(data: bytes, what: str = "cubin") -> GpuFacts:
    """Facts of a cubin.

    Raises:
        CorruptPart: no cubin, cut short, or the file names two architectures.
    """
    image = ElfImage(data, what)
    if image.machine != EM_CUDA:
        raise image.corrupt(f"it is for machine {image.machine}, not a GPU ({EM_CUDA})")
    number, suffix = _flags(image)
    noted, release = _tool_note(image)
    if noted is not None:
        if noted[0] != number:
            raise image.corrupt(f"its header says sm_{number}, its assembler's note sm_{noted[0]}{noted[1]}")
        suffix = noted[1]
    elif _arch_specific(image):
        suffix = "a"
    try:
        target = Target(*capability_of(number), "sass", suffix)
    except ValueError as exc:
        raise image.corrupt(f"its header names the architecture {number}") from exc
    kernels = {s.name for s in image.symbols() if s.is_function and s.other & _STO_ENTRY}
    image.check_whole()
    return GpuFacts(target, tuple(sorted(kernels)), None, release)


def _flags(image: ElfImage) -> tuple[int, Suffix]:
    if image.abi_version == 7:
        return image.flags & 0xFF, "a" if image.flags & 0x800 else ""
    if image.abi_version == 8:
        return image.flags >> 8 & 0xFF, "a" if image.flags & 0x8 else ""
    raise image.corrupt(f"cubin ABI version {image.abi_version}; 7 and 8 are known")


def _tool_note(image: ElfImage) -> tuple[tuple[int, Suffix] | None, tuple[int, int] | None]:
    """Architecture and release of the assembler's note."""
    note = image.section(".note.nv.tkinfo")
    if note is None or len(note) < 12:
        return None, None
    name_size, size, kind = struct.unpack_from("<III", note)
    start = 12 + (name_size + 3) // 4 * 4
    if kind != _NOTE_TOOL or start + size > len(note):
        return None, None
    strings = note[start + 24 : start + size].decode("utf-8", "replace")
    arch = re.search(r"-arch[= ]sm_(\d+)([af]?)(?![0-9a-z])", strings)
    release = re.search(r"release (\d+)\.(\d+)", strings)
    suffix: Suffix = "a" if arch and arch[2] == "a" else "f" if arch and arch[2] == "f" else ""
    return (
        (int(arch[1]), suffix) if arch else None,
        (int(release[1]), int(release[2])) if release else None,
    )


def _arch_specific(image: ElfImage) -> bool:
    compat = image.section(".nv.compat") or b""
    return compat[:3] == _COMPAT_ISA_CLASS + b"\x01"


def read_ptx(source: bytes | str, what: str = "PTX") -> GpuFacts:
    """Facts of PTX text.

    Raises:
        CorruptPart: it lacks ``.version`` or ``.target``, or is cut in the middle of a kernel.
    """
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
    code = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text.rstrip("\0\n "), flags=re.DOTALL)
    version = re.search(r"^\s*\.version\s+(\d{1,3})\.(\d{1,3})\b", code, re.MULTILINE)
    target = re.search(r"^\s*\.target\s+sm_(\d{2,3})([af]?)\b", code, re.MULTILINE)
    if version is None or target is None:
        missing = ".version" if version is None else ".target"
        raise CorruptPart(f"{what} is damaged", f"it has no {missing} line", "build the part again")
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', code)
    if bare.count("{") != bare.count("}"):
        raise CorruptPart(f"{what} is damaged", "its braces do not close: it is cut short", "build the part again")
    suffix: Suffix = "a" if target[2] == "a" else "f" if target[2] == "f" else ""
    try:
        found = Target(*capability_of(int(target[1])), "ptx", suffix)
    except ValueError as exc:
        raise CorruptPart(f"{what} is damaged", f"its target is {target[0]!r}", "build the part again") from exc
    kernels = re.findall(r"\.entry\s+([A-Za-z_$%][\w$]*)", bare)
    return GpuFacts(found, tuple(sorted(set(kernels))), (int(version[1]), int(version[2])), None)
