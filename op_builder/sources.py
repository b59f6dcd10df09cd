"""Which files an op is made of, found by reading their ``#include`` lines, and the digest that makes a part stale."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .spec import OpSpec

# What a part's meaning depends on besides its sources, whatever compiles it. Part of the source digest: a change here
# makes every part stale.
_HOST_MEANING = ("c++17", "fp-contract=off")
_DEVICE_MEANING = ("c++17", "fmad=false")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"\n]+)"|([A-Za-z_]\w*))', re.MULTILINE)
_DEFINE = re.compile(r'^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)[ \t]+"([^"\n]+)"[ \t]*$', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One file: ``rel`` to ``csrc`` with forward slashes, ``path`` on this machine."""

    rel: str
    path: Path


def ffi_abi(version: str) -> str:
    """The ABI's name: TVM-FFI keeps it within ``major.minor``.

    >>> ffi_abi("0.1.15.post2")
    'tvm-ffi 0.1'
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UsageError(
            f"apache-tvm-ffi has version {version!r}", "expected major.minor", "pip install apache-tvm-ffi"
        )
    return f"tvm-ffi {match[1]}.{match[2]}"


def read_source(path: Path) -> str:
    """A source's text with the line ends of Unix: a checkout on Windows has the same digests."""
    facts = path.stat()
    return _read(path, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=256)
def _read(path: Path, _mtime_ns: int, _size: int) -> str:
    return path.read_text(encoding="utf-8").replace("\r\n", "\n")


def find_headers(csrc: Path, sources: Iterable[Source]) -> Mapping[str, Source]:
    """Our own headers that the sources include, directly or not, by the name their directives spell.

    A directive that names no file under ``csrc`` is the compiler's business. A directive that names a macro is followed
    through every ``#define NAME "file"`` that stands in a scanned file.

    Raises:
        UsageError: one spelling means two files (NVRTC takes headers by name), or a macro stands for no file.
    """
    found: dict[str, Source] = {}
    defined: dict[str, set[str]] = {}
    asked: dict[str, str] = {}
    queue, seen = list(sources), set()
    root = str(csrc.resolve())
    while queue:
        source = queue.pop()
        if source.path in seen:
            continue
        seen.add(source.path)
        text = read_source(source.path)
        names = [name for name, _ in _INCLUDE.findall(text) if name]
        asked.update((macro, source.rel) for _, macro in _INCLUDE.findall(text) if macro)
        for macro, name in _DEFINE.findall(text):
            if _resolve(root, source, name) is not None:
                defined.setdefault(macro, set()).add(name)
                names.append(name)
        for name in names:
            header = _resolve(root, source, name)
            if header is None:
                continue
            if found.setdefault(name, header).path != header.path:
                raise UsageError(
                    f'#include "{name}" in {source.rel} means {header.rel}',
                    f"elsewhere in this op it means {found[name].rel}, and NVRTC knows headers by that name alone",
                    "spell both from the root of csrc",
                )
            queue.append(header)
    for macro, rel in asked.items():
        if macro not in defined:
            raise UsageError(
                f"#include {macro} in {rel} cannot be followed",
                f'no file of this op has a line #define {macro} "<file>"',
                "spell the file name in the directive",
            )
    return dict(sorted(found.items()))


def _resolve(root: str, includer: Source, name: str) -> Source | None:
    """The file under ``root`` that a directive names, from its own folder or from the root."""
    for folder in (str(includer.path.parent), root):
        path = os.path.normpath(os.path.join(folder, name))  # noqa: PTH118  # pathlib took half of a load's time here
        if path.startswith(root + os.sep) and os.path.isfile(path):  # noqa: PTH113
            return Source(path[len(root) + 1 :].replace(os.sep, "/"), Path(path))
    return None


def sources_of(csrc: Path, names: Iterable[str]) -> tuple[Source, ...]:
    """The files of a spec's list."""
    root = csrc.resolve()
    return tuple(Source(name, root / name) for name in names)


def digest(facts: Any) -> str:
    """sha256 of a JSON-serialisable value."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def source_digest(spec: OpSpec, kind: str, csrc: Path, abi: str) -> str:
    """Digest of what a part was made from, whatever made it: a part with another digest is stale.

    Args:
        spec: the op.
        kind: ``host`` or ``device``.
        csrc: root of the sources.
        abi: of the calling convention; counts for host parts only.
    """
    sources = sources_of(csrc, spec.host if kind == "host" else spec.device)
    headers = find_headers(csrc, sources)
    return digest_of(kind, sources, headers, abi)


def digest_of(kind: str, sources: Sequence[Source], headers: Mapping[str, Source], abi: str) -> str:
    """:func:`source_digest` of files already found."""
    files = {s.rel: hashlib.sha256(read_source(s.path).encode()).hexdigest() for s in (*sources, *headers.values())}
    meaning = (*_HOST_MEANING, abi) if kind == "host" else _DEVICE_MEANING
    return digest([kind, [s.rel for s in sources], files, meaning])
