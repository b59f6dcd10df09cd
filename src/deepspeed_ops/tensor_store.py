"""Tensors in a folder on a fast disk: :class:`TensorStore` saves and loads whole state dictionaries.

    store = TensorStore("/nvme/run1")
    store.save("optimizer", optimizer.state_dict())
    optimizer.load_state_dict(store.load("optimizer"))

What is saved under a name replaces what was there in one step: it is written beside it, flushed to the disk, and
renamed. A crash at any moment, of the process or of the machine, leaves the old version or the new one. Every chunk
carries a digest that loading checks. While both versions exist, both take room.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import tensor_file as tf
from deepspeed_ops.aio import IoQueue, OpenFile
from deepspeed_ops.op_builder.errors import CorruptFile, IoFailed, TensorError, UsageError
from deepspeed_ops.op_builder.locks import hold
from deepspeed_ops.tensor_stream import ChunkReader, ChunkWriter

SUFFIX = ".tensors"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Saved:
    """One saved name.

    Attributes:
        name: of the state.
        tensors: how many it holds.
        nbytes: of all its tensors.
        file_bytes: of its file.
    """

    name: str
    tensors: int
    nbytes: int
    file_bytes: int


class Saving:
    """A save under way; made by ``TensorStore.save(..., wait=False)``."""

    def __init__(self, work: Any) -> None:
        self._result: Saved | None = None
        self._failure: BaseException | None = None

        def run() -> None:
            try:
                self._result = work()
            except BaseException as exc:
                self._failure = exc

        self._thread = threading.Thread(target=run, name="TensorStore.save")  # no daemon: an exit waits for it
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self) -> Saved:
        """Wait for the end; raises what the save raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result


class TensorStore:
    """States by name in one folder.

    Args:
        folder: made if need be. Fast where its file system does direct I/O.
        block_size: most bytes of one transfer.
        queue_depth: transfers in flight a thread.
        threads: threads that work on transfers.
        backend: as :class:`deepspeed_ops.aio.IoQueue` has it.

    Raises:
        UsageError: an argument out of range.
        IoFailed: the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        block_size: int = 1 << 20,
        queue_depth: int = 32,
        threads: int = 1,
        backend: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        with _system_errors("make", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._queue = IoQueue(block_size, queue_depth, threads, backend=backend)

    def __repr__(self) -> str:
        return f"TensorStore({str(self.folder)!r})"

    # --- saving ---

    def save(self, name: str, state: Any, *, wait: bool = True) -> Any:
        """Save a tree of tensors under ``name``, replacing in one step what was there.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            state: dictionaries (keys strings or ints), lists and tuples of tensors, numbers, strings and None. Tensors
                of any dtype on the CPU or a GPU; dense memory keeps its strides; a parameter is saved as its data.
            wait: False returns at once with a :class:`Saving`; no tensor may change until its ``wait()`` returned.

        Returns:
            :class:`Saved`, or a :class:`Saving`.

        Raises:
            TensorError: something in ``state`` cannot be saved; nothing was written.
            IoFailed: the disk is full or failing; the old version stays.
        """
        path = self._path(name)
        tree, tensors = tf.flatten(state)
        streams = {t.device: torch.cuda.current_stream(t.device) for t in tensors if t.is_cuda}

        def work() -> Saved:
            with contextlib.ExitStack() as stack:
                for stream in streams.values():  # what the caller's stream still has to write comes first
                    stack.enter_context(torch.cuda.stream(stream))
                return self._save(name, path, tree, tensors)

        return work() if wait else Saving(work)

    def _save(self, name: str, path: Path, tree: Any, tensors: Sequence[Tensor]) -> Saved:
        entries, end = tf.lay_out(tensors)
        with hold(self.folder / ".locks", name) as locked:
            if locked:
                self._sweep(name)
            private = self.folder / f".{name}.{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp"
            try:
                length = self._write(private, tree, tensors, entries, end)
                with _system_errors("replace", path):
                    private.replace(path)
                    flush(self.folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    private.unlink()
                raise
        return Saved(name, len(entries), sum(e.nbytes for e in entries), length)

    def _write(self, private: Path, tree: Any, tensors: Sequence[Tensor], entries: Sequence[tf.Entry], end: int) -> int:
        """Write a whole file and flush it; returns its length."""
        _reserve(private, end)
        with self._queue.open(private, write=True) as file:
            with ChunkWriter(self._queue, file) as out:
                out.write(_small_run(tensors, entries), tf.BLOCK)
                for tensor, entry in zip(tensors, entries, strict=True):
                    if entry.nbytes >= tf.SMALL:
                        out.write(tf.memory(tensor), entry.offset)
            chunks = tuple(sorted(out.chunks, key=lambda c: c.offset))
            header, index = tf.pack(tf.Index(tree, tuple(entries), chunks), end)
            self._queue.write(bytearray(index), file, end)
            self._queue.write(bytearray(header), file, 0, sync=True)
        return end + len(index)

    def _sweep(self, name: str) -> None:
        """Remove what dead writers of this name left; we hold its lock, so no live one has any."""
        for left in self.folder.glob(f".{name}.*.tmp"):
            with contextlib.suppress(OSError):
                left.unlink()

    # --- loading ---

    def load(self, name: str, *, device: torch.device | str | None = None) -> Any:
        """The tree saved under ``name``, in new tensors.

        Args:
            name: of the state.
            device: for all tensors; None: where each one was.

        Raises:
            IoFailed: nothing is saved under ``name`` (``ENOENT``), or the disk fails.
            CorruptFile: the file was damaged or cut short since it was saved.
            UsageError: a tensor was on a GPU that is not here.
        """
        with self._open(name) as (file, index):
            tensors = [entry.empty(_device(entry, device)) for entry in index.tensors]
            self._read(file, index, tensors)
        return tf.unflatten(index.tree, tensors)

    def load_into(self, name: str, state: Any) -> Any:
        """Read what is saved under ``name`` into the tensors of ``state``, which has the same tree; no new memory.

        Args:
            name: of the state.
            state: its tensors are mutated; strides may differ from those saved.

        Returns:
            The tree as saved, with the tensors of ``state`` in it.

        Raises:
            TensorError: trees, shapes or dtypes differ; nothing was changed.
            IoFailed, CorruptFile: as :meth:`load`; the tensors then hold parts of both.
        """
        with self._open(name) as (file, index):
            tree, tensors = tf.flatten(state)
            _refuse_differences(name, index, tree, tensors)
            direct = [
                t if t.stride() == e.strides else e.empty(t.device) for t, e in zip(tensors, index.tensors, strict=True)
            ]
            self._read(file, index, direct)
            with torch.no_grad():
                for target, source in zip(tensors, direct, strict=True):
                    if target is not source:
                        target.copy_(source)
        return tf.unflatten(index.tree, tensors)

    def _read(self, file: OpenFile, index: tf.Index, tensors: Sequence[Tensor]) -> None:
        small = torch.empty(tf.small_end(index.tensors) - tf.BLOCK, dtype=torch.uint8)
        digests = {c.offset: c for c in index.chunks}
        with ChunkReader(self._queue, file, digests) as source:
            source.read(small, tf.BLOCK)
            for tensor, entry in zip(tensors, index.tensors, strict=True):
                if entry.nbytes >= tf.SMALL:
                    source.read(tf.memory(tensor), entry.offset)
        for tensor, entry in zip(tensors, index.tensors, strict=True):
            if 0 < entry.nbytes < tf.SMALL:
                begin = entry.offset - tf.BLOCK
                tf.memory(tensor).copy_(small[begin : begin + entry.nbytes])

    # --- looking ---

    def names(self) -> tuple[str, ...]:
        """What is saved, in the order of the names."""
        found = (p.name.removesuffix(SUFFIX) for p in self.folder.glob(f"*{SUFFIX}"))
        return tuple(sorted(n for n in found if _NAME.fullmatch(n)))

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def info(self, name: str) -> Saved:
        """How much is saved under ``name``; reads header and index only."""
        with self._open(name) as (file, index):
            return Saved(name, len(index.tensors), sum(e.nbytes for e in index.tensors), file.size())

    def verify(self, name: str) -> Saved:
        """Read everything saved under ``name`` and check it; 16 MiB at a time.

        Raises:
            IoFailed, CorruptFile: as :meth:`load`.
        """
        with self._open(name) as (file, index):
            for chunk in index.chunks:
                room = torch.empty(chunk.nbytes, dtype=torch.uint8)
                with ChunkReader(self._queue, file, {chunk.offset: chunk}) as source:
                    source.read(room, chunk.offset)
        return self.info(name)

    def delete(self, name: str) -> None:
        """Remove what is saved under ``name``.

        Raises:
            IoFailed: nothing is (``ENOENT``), or it cannot be removed.
        """
        path = self._path(name)
        with _system_errors("delete", path):
            path.unlink()
            flush(self.folder)

    # --- the end ---

    def close(self) -> None:
        """Give threads and descriptors back. Twice is once."""
        self._queue.close()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"a state cannot be named {name!r}", "expected letters, digits, '.', '_' and '-'", "")
        return self.folder / f"{name}{SUFFIX}"

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[tuple[OpenFile, tf.Index]]:
        path = self._path(name)
        with self._queue.open(path) as file:
            length = file.size()
            block = bytearray(min(tf.BLOCK, length))
            self._queue.read(block, file)
            header = tf.read_header(bytes(block), str(path))
            if header.length != length:
                why = f"it has {length} bytes, its header says {header.length}"
                raise CorruptFile(f"{path} was cut or added to", why, "restore the file from a copy")
            text = bytearray(header.nbytes)
            self._queue.read(text, file, header.offset)
            yield file, tf.read_index(bytes(text), header, str(path))


def _small_run(tensors: Sequence[Tensor], entries: Sequence[tf.Entry]) -> Tensor:
    """The small tensors side by side, as they lie in the file."""
    run = torch.zeros(tf.small_end(entries) - tf.BLOCK, dtype=torch.uint8)
    for tensor, entry in zip(tensors, entries, strict=True):
        if 0 < entry.nbytes < tf.SMALL:
            begin = entry.offset - tf.BLOCK
            run[begin : begin + entry.nbytes] = tf.memory(tensor)
    return run


def _device(entry: tf.Entry, asked: torch.device | str | None) -> torch.device:
    device = torch.device(asked) if asked is not None else torch.device(entry.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = f"this process sees {torch.cuda.device_count()} CUDA devices"
        raise UsageError(f"a saved tensor was on {device}", why, 'store.load(name, device="cpu")')
    return device


def _refuse_differences(name: str, index: tf.Index, tree: Any, tensors: Sequence[Tensor]) -> None:
    fix = "load it with store.load(name)"
    if _shape(tree) != _shape(index.tree) or len(tensors) != len(index.tensors):
        raise TensorError(f"{name} was saved with another tree than it shall be loaded into", "", fix)
    for number, (tensor, entry) in enumerate(zip(tensors, index.tensors, strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != entry.shape or dtype != entry.dtype:
            why = f"saved {entry.dtype} {entry.shape}, here {dtype} {tuple(tensor.shape)}"
            raise TensorError(f"tensor {number} of {name} differs", why, fix)
        if not tf.is_dense(tensor.shape, tensor.stride()):
            raise TensorError(
                f"tensor {number} of {name} cannot be read into", f"its strides are {tensor.stride()}", fix
            )


def _shape(tree: Any) -> Any:
    """A tree without its plain values."""
    if not isinstance(tree, dict):
        return None
    ((kind, inside),) = tree.items()
    if kind == "dict":
        return [kind, [[k, _shape(v)] for k, v in inside]]
    return [kind, [_shape(v) for v in inside]] if kind in ("list", "tuple") else tree


def _reserve(path: Path, length: int) -> None:
    """Make a file with room for its data: a full disk says so before anything is written."""
    with _system_errors("write", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, length)
        finally:
            os.close(fd)


def flush(folder: Path) -> None:
    """Make a rename in a folder durable; Windows has nothing to ask for."""
    if sys.platform == "win32":
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _system_errors(what: str, path: Path) -> Iterator[None]:
    """What the system refuses, as :class:`IoFailed`."""
    try:
        yield
    except IoFailed:
        raise
    except OSError as exc:
        why = f"{type(exc).__name__}: {exc.strerror or exc}"
        raise IoFailed(f"cannot {what} {path}", why, "", errno=exc.errno, filename=str(path)) from exc
