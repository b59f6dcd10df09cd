"""What is true of a built part: a small JSON file beside it, written at the build and checked before each load."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import CorruptPart

if TYPE_CHECKING:
    from .binaries import BinaryFacts as BinaryFacts
    from .binaries import read_macho as read_macho
    from .binaries import read_pe as read_pe
    from .cubin import GpuFacts as GpuFacts
    from .cubin import read_cubin as read_cubin
    from .cubin import read_gpu as read_gpu
    from .cubin import read_ptx as read_ptx
    from .elf import ElfFacts as ElfFacts
    from .elf import read_elf as read_elf

__all__ = [
    "BinaryFacts",
    "ElfFacts",
    "GpuFacts",
    "Manifest",
    "facts_as_fields",
    "file_sha256",
    "read_cubin",
    "read_elf",
    "read_gpu",
    "read_macho",
    "read_manifest",
    "read_pe",
    "read_ptx",
    "write_manifest",
]

# Readers of finished parts. A process that only loads parts never reads one back, so they are imported when asked for.
_READERS = {
    **dict.fromkeys(("BinaryFacts", "read_macho", "read_pe"), "binaries"),
    **dict.fromkeys(("GpuFacts", "read_cubin", "read_gpu", "read_ptx"), "cubin"),
    **dict.fromkeys(("ElfFacts", "read_elf"), "elf"),
}


def __getattr__(name: str) -> Any:
    if name not in _READERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_READERS[name]}", __package__), name)
    globals()[name] = found
    return found


# Raised when a field changes its meaning; a reader refuses manifests of a later format.
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """One part.

    Attributes:
        op: name of the op.
        variant: ``linux-x86_64``, ``sm90a``, ``ptx75``.
        kind: ``host`` or ``device``.
        filename: bare name of the part's file, in the manifest's own folder.
        key: the store key, a digest of everything that decides the part.
        source_digest: digest of sources and headers.
        compiler: ``g++ 12.2.0`` or ``nvrtc 13.0``.
        compiler_release: CUDA release of the compiler, ``(13, 0)``; None for host parts.
        flags: compiler flags of the plan.
        user_flags: flags the user added (``CXXFLAGS`` and its kin).
        abi: calling convention, ``tvm-ffi 0.1``.
        platform: ``linux-x86_64``; ``""`` for GPU parts.
        glibc: lowest glibc that loads it, read from the file; None without one.
        simd: SIMD levels compiled in, best first.
        needed: libraries it loads, read from the file.
        ptx_isa: PTX version, read from the file; None for others.
        kernels: GPU entry points, read from the file.
        size: bytes of the file.
        sha256: digest of the file, hexadecimal.
        created_by: version of this project that built it.
    """

    op: str
    variant: str
    kind: Literal["host", "device"]
    filename: str
    key: str
    source_digest: str
    compiler: str
    compiler_release: tuple[int, int] | None = None
    flags: tuple[str, ...] = ()
    user_flags: tuple[str, ...] = ()
    abi: str = ""
    platform: str = ""
    glibc: tuple[int, int] | None = None
    simd: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    ptx_isa: tuple[int, int] | None = None
    kernels: tuple[str, ...] = ()
    size: int = 0
    sha256: str = ""
    created_by: str = ""

    def to_json(self) -> str:
        """Canonical text: sorted keys, one trailing newline; equal manifests give equal bytes."""
        data = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "manifest") -> Manifest:
        """The manifest of a JSON text.

        Raises:
            CorruptPart: no JSON object, of a later format, a key missing, unknown or of the wrong type.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _corrupt(where, f"it is not JSON: {exc}") from exc
        if not isinstance(data, dict):
            raise _corrupt(where, f"expected an object, found {type(data).__name__}")
        found = data.pop("format", None)
        if found != FORMAT or isinstance(found, bool):
            raise _corrupt(where, f"expected format {FORMAT}, found {found!r}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if set(data) != set(fields):
            missing, unknown = sorted(set(fields) - set(data)), sorted(set(data) - set(fields))
            raise _corrupt(where, f"missing keys {missing}, unknown keys {unknown}")
        hints = _hints()
        manifest = cls(**{name: _typed(value, hints[name], where, name) for name, value in data.items()})
        # A part lies in its manifest's own folder: no separators, no drive, neither "." nor "..".
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", manifest.filename):
            raise _corrupt(where, f"{manifest.filename!r} is not a bare file name")
        return manifest

    def with_file(self, path: Path) -> Manifest:
        """The same manifest with name, size and digest of that file."""
        return dataclasses.replace(self, filename=path.name, size=path.stat().st_size, sha256=file_sha256(path))

    def verify(self, path: Path) -> None:
        """Compare a part's file with this manifest; the size first, which costs nothing.

        Raises:
            CorruptPart: unreadable, or size or sha256 differ.
        """
        fix = f"delete {path.parent} and load the op again: the part is built anew"
        try:
            size = path.stat().st_size
            if size != self.size:
                raise CorruptPart(f"{path} is damaged", f"expected {self.size} bytes, found {size}", fix)
            digest = file_sha256(path)
        except OSError as exc:
            raise CorruptPart(f"cannot read {path}", str(exc), fix) from exc
        if digest != self.sha256:
            raise CorruptPart(f"{path} is damaged", f"expected sha256 {self.sha256}, found {digest}", fix)


def _corrupt(where: str, why: str) -> CorruptPart:
    return CorruptPart(f"{where} is not a manifest of ours", why, "delete the part's folder; it is built anew")


@functools.cache
def _hints() -> Mapping[str, Any]:
    """Types of the manifest's fields; evaluating them takes longer than reading a manifest."""
    return typing.get_type_hints(Manifest)


def _typed(value: Any, hint: Any, where: str, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        good = isinstance(value, str) and value in args
        result: Any = value
    elif type(None) in args:
        if value is None:
            return None
        return _typed(value, next(a for a in args if a is not type(None)), where, name)
    elif origin is tuple:
        kind, exact = (args[0], None) if args[-1] is Ellipsis else (int, len(args))
        good = isinstance(value, list) and all(type(v) is kind for v in value)
        good = good and (exact is None or len(value) == exact)
        result = tuple(value) if good else ()
    else:
        good, result = type(value) is hint, value
    if not good:
        raise _corrupt(where, f"{name} is {value!r}")
    return result


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in blocks of 1 MiB.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        CorruptPart: unreadable, or not a manifest.
    """
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise CorruptPart(f"cannot read {path}", str(exc), "delete the part's folder; it is built anew") from exc
    return Manifest.from_json(text, str(path))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest, with line feeds on every system.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_bytes(manifest.to_json().encode("ascii"))


def facts_as_fields(facts: GpuFacts | ElfFacts | BinaryFacts) -> Mapping[str, Any]:
    """The manifest fields that are read back from a finished part: pass them to :class:`Manifest` or ``replace``."""
    from .cubin import GpuFacts
    from .elf import ElfFacts

    if isinstance(facts, GpuFacts):
        return {"variant": facts.target.variant, "kernels": facts.kernels, "ptx_isa": facts.isa}
    if isinstance(facts, ElfFacts):
        return {"needed": facts.needed, "glibc": facts.glibc}
    return {"needed": facts.needed, "glibc": None}
