"""The file of a :class:`deepspeed_ops.tensor_store.TensorStore`: what is where, and the JSON that says so. No I/O here.

    0          header, one block: magic, format, place and XXH3-128 of the index, length of the file, XXH3-64 of itself
    4096       tensors, each from a block boundary on; those below 64 KiB together in one run
    ...        index: JSON with the tree, the tensors and the digest of every chunk

A chunk is what is read, written and checked in one go. Nothing is executed when a file is read: the tree holds
dictionaries, lists, tuples, numbers, strings, None and tensors, and nothing else is saved.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from deepspeed_ops.op_builder.errors import CorruptFile, TensorError

BLOCK = 4096
CHUNK = 16 << 20  # long enough for full bandwidth, short enough that checking one overlaps with moving the next
SMALL = 64 << 10
_ALIGN_SMALL = 64
_MAGIC, _FORMAT = b"DSTENSOR", 1
_HEADER = struct.Struct("<8sIIQQQ16s")
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True)
class Entry:
    """One tensor: how it looks and where its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    offset: int
    nbytes: int

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor of this look."""
        return torch.empty_strided(self.shape, self.strides, dtype=_DTYPES[self.dtype], device=device)


@dataclass(frozen=True)
class Chunk:
    """Bytes that are moved and checked together: ``offset`` and ``nbytes`` in the file, XXH3-64 in hexadecimal."""

    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Index:
    """What a file holds: the tree with tensors as numbers, the tensors, the chunks in the order of their offsets."""

    tree: Any
    tensors: tuple[Entry, ...]
    chunks: tuple[Chunk, ...]


# --- trees --------------------------------------------------------------------------------------------------------


def flatten(value: Any, path: str = "state") -> tuple[Any, list[Tensor]]:
    """A tree as JSON-serialisable data with tensors as numbers, and the tensors; equal views of one memory count once.

    Raises:
        TensorError: a leaf is no tensor, number, string or None, or a tensor that has no plain memory.
    """
    tensors: list[Tensor] = []
    known: dict[tuple[Any, ...], int] = {}

    def walk(node: Any, at: str) -> Any:
        if isinstance(node, Tensor):
            _check(node, at)
            node = node.detach()
            key = (node.device, node.data_ptr(), node.dtype, tuple(node.shape), node.stride())
            if not node.numel() or key not in known:
                known[key] = len(tensors)
                tensors.append(node)
            return {"tensor": known[key]}
        if isinstance(node, Mapping):
            return {"dict": [[walk_key(k, at), walk(v, f"{at}[{k!r}]")] for k, v in node.items()]}
        if type(node) in (list, tuple):
            return {type(node).__name__: [walk(v, f"{at}[{i}]") for i, v in enumerate(node)]}
        if isinstance(node, float) and not math.isfinite(node):
            return {"float": repr(node)}
        if node is None or type(node) in (bool, int, float, str):
            return node
        what = f"{at} is a {type(node).__name__}"
        raise TensorError(what, "a store keeps tensors, numbers, strings, None, lists, tuples and dictionaries", "")

    def walk_key(key: Any, at: str) -> Any:
        if type(key) in (str, int):
            return key
        raise TensorError(f"a key of {at} is {key!r}", "expected a string or an int", "")

    return walk(value, path), tensors


def unflatten(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of :func:`flatten`."""
    if isinstance(tree, dict):
        ((kind, inside),) = tree.items()
        if kind == "tensor":
            return tensors[inside]
        if kind == "dict":
            return {k: unflatten(v, tensors) for k, v in inside}
        if kind == "float":
            return float(inside)
        items = [unflatten(v, tensors) for v in inside]
        return tuple(items) if kind == "tuple" else items
    return tree


def _check(tensor: Tensor, at: str) -> None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else Tensor)
    if (
        not plain
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.device.type not in ("cpu", "cuda")
    ):
        what = f"{at} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TensorError(what, "expected a plain dense tensor on the CPU or a CUDA device", "")


def memory(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat ``uint8`` tensor: its own memory where that is dense, else a dense copy.

    Dense memory in another order (``channels_last``, a transpose) keeps its strides.
    """
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps and without sharing any.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (0, 1)), is_dense((2, 3), (6, 2))
    (True, False, False)
    """
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# --- layout -------------------------------------------------------------------------------------------------------


def lay_out(tensors: Sequence[Tensor]) -> tuple[list[Entry], int]:
    """Where each tensor goes, and where the last one ends; the order of the entries is that of the tensors."""
    places, end = [0] * len(tensors), BLOCK
    sizes = [t.numel() * t.element_size() for t in tensors]
    for small in (True, False):
        for i, size in enumerate(sizes):
            if (size < SMALL) == small:
                end = _up(end, _ALIGN_SMALL if small else BLOCK)
                places[i] = end
                end += size
        end = _up(end, BLOCK)
    entries = []
    for tensor, place, size in zip(tensors, places, sizes, strict=True):
        dense = is_dense(tensor.shape, tensor.stride())
        strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        look = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(strides), str(tensor.device))
        entries.append(Entry(*look, place, size))
    return entries, end


def small_end(entries: Sequence[Entry]) -> int:
    """Where the run of small tensors ends; ``BLOCK`` without any."""
    return max((e.offset + e.nbytes for e in entries if e.nbytes < SMALL), default=BLOCK)


def pieces(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """``(offset, bytes)`` of the chunks of one run, ``offset`` relative to the run's begin.

    >>> [size for _, size in pieces(0, (32 << 20) + 5)]
    [16777216, 16777216, 5]
    """
    for start in range(0, nbytes, CHUNK):
        yield offset + start, min(CHUNK, nbytes - start)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


# --- header and index ---------------------------------------------------------------------------------------------


def digest(data: Any) -> str:
    """XXH3-64 of a buffer, in hexadecimal."""
    return str(xxhash.xxh3_64_hexdigest(data))


def pack(index: Index, offset: int) -> tuple[bytes, bytes]:
    """The header block and the index, which goes to ``offset`` and ends the file."""
    body = {
        "tree": index.tree,
        "tensors": [[e.dtype, list(e.shape), list(e.strides), e.device, e.offset, e.nbytes] for e in index.tensors],
        "chunks": [[c.offset, c.nbytes, c.digest] for c in index.chunks],
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    fields = _HEADER.pack(_MAGIC, _FORMAT, 0, offset, len(text), offset + len(text), xxhash.xxh3_128_digest(text))
    return (fields + xxhash.xxh3_64_digest(fields)).ljust(BLOCK, b"\0"), text


@dataclass(frozen=True)
class Header:
    """Place of the index, its digest, and the length of the whole file."""

    offset: int
    nbytes: int
    length: int
    digest: bytes


def read_header(block: bytes, path: str) -> Header:
    """What the first block says.

    Raises:
        CorruptFile: it is not a header of ours, or damaged, or of a newer format.
    """
    fields = block[: _HEADER.size]
    if len(block) < BLOCK or block[:8] != _MAGIC:
        raise CorruptFile(f"{path} is no tensor file", "its first bytes are others", "")
    if xxhash.xxh3_64_digest(fields) != block[_HEADER.size : _HEADER.size + 8]:
        raise CorruptFile(f"{path} has a damaged header", "its digest differs", "restore the file from a copy")
    _, version, _, offset, nbytes, length, found = _HEADER.unpack(fields)
    if version != _FORMAT:
        raise CorruptFile(f"{path} has format {version}", f"this version reads format {_FORMAT}", "update this package")
    return Header(offset, nbytes, length, found)


def read_index(text: bytes, header: Header, path: str) -> Index:
    """The index.

    Raises:
        CorruptFile: it is damaged.
    """
    if xxhash.xxh3_128_digest(text) != header.digest:
        raise CorruptFile(f"{path} has a damaged index", "its digest differs", "restore the file from a copy")
    body = json.loads(text)
    tensors = tuple(Entry(d, tuple(shape), tuple(strides), *rest) for d, shape, strides, *rest in body["tensors"])
    return Index(body["tree"], tensors, tuple(Chunk(*c) for c in body["chunks"]))
