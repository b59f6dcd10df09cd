"""Chunks of a tensor file on their way: while one is moved by the disk, the next is copied from the GPU and checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import tensor_file as tf
from deepspeed_ops.aio import IoQueue, OpenFile
from deepspeed_ops.op_builder.errors import CorruptFile

_IN_FLIGHT = 8  # chunks; 128 MiB
_ROOMS = 4  # pinned chunks of a GPU's traffic


class _Traffic:
    """What writing and reading share: a bounded number of chunks in flight, and pinned rooms for those of a GPU."""

    def __init__(self, queue: IoQueue, file: OpenFile) -> None:
        self.queue, self.file = queue, file
        self._waiting: deque[tuple[int, Any]] = deque()
        self._rooms: list[Tensor] = []

    def _room(self) -> Tensor:
        """A pinned chunk that nothing uses."""
        if self._rooms:
            return self._rooms.pop()
        return torch.empty(tf.CHUNK, dtype=torch.uint8, pin_memory=True)

    def _wait_one(self) -> None:
        ticket, after = self._waiting.popleft()
        self.queue.wait(ticket)
        after()

    def _drain(self) -> None:
        while self._waiting:
            self._wait_one()

    def _abandon(self) -> None:
        """After a failure: no request may still be under way when buffers go."""
        while self._waiting:
            ticket, _ = self._waiting.popleft()
            try:
                self.queue.wait(ticket)
            except OSError:
                continue  # the first failure is on its way to the caller


class ChunkWriter(_Traffic):
    """Writes runs of bytes in chunks; ``chunks`` has their digests once the block has ended."""

    def __init__(self, queue: IoQueue, file: OpenFile) -> None:
        super().__init__(queue, file)
        self.chunks: list[tf.Chunk] = []
        self._copied: tuple[Tensor, Tensor, torch.cuda.Event, int] | None = None

    def write(self, run: Tensor, offset: int) -> None:
        """Write a flat ``uint8`` tensor at ``offset``; it must not change until the block has ended."""
        for start, size in tf.pieces(0, run.numel()):
            piece = run[start : start + size]
            if piece.is_cuda:
                self._copy(piece, offset + start)
            else:
                self._send(piece, offset + start, None)

    def _copy(self, piece: Tensor, offset: int) -> None:
        """Start a copy out of the GPU, then send the one before it."""
        while len(self._waiting) + 2 > _ROOMS:
            self._wait_one()
        room = self._room()
        part = room[: piece.numel()]
        part.copy_(piece, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(piece.device))
        before, self._copied = self._copied, (room, part, event, offset)
        self._flush(before)

    def _flush(self, copied: tuple[Tensor, Tensor, torch.cuda.Event, int] | None) -> None:
        if copied is not None:
            room, part, event, offset = copied
            event.synchronize()
            self._send(part, offset, room)

    def _send(self, piece: Tensor, offset: int, room: Tensor | None) -> None:
        while len(self._waiting) >= _IN_FLIGHT:
            self._wait_one()
        ticket = self.queue.submit_write(piece, self.file, offset)
        self._waiting.append((ticket, (lambda: self._rooms.append(room)) if room is not None else (lambda: None)))
        # The disk is busy with it now: time to look at the bytes.
        self.chunks.append(tf.Chunk(offset, piece.numel(), tf.digest(piece.numpy())))

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                copied, self._copied = self._copied, None
                self._flush(copied)
                self._drain()
        finally:
            self._abandon()


class ChunkReader(_Traffic):
    """Reads runs of bytes in the chunks they were written in, and compares digests.

    Raises:
        CorruptFile: a digest differs, or a chunk is not known.
    """

    def __init__(self, queue: IoQueue, file: OpenFile, digests: Mapping[int, tf.Chunk]) -> None:
        super().__init__(queue, file)
        self._digests = digests
        self._copies: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read(self, run: Tensor, offset: int) -> None:
        """Fill a flat ``uint8`` tensor (mutated; complete once the block has ended) from ``offset`` on."""
        for start, size in tf.pieces(0, run.numel()):
            piece, at = run[start : start + size], offset + start
            chunk = self._digests.get(at)
            if chunk is None or chunk.nbytes != size:
                raise CorruptFile(f"{self.file.path} lacks the chunk at byte {at}", "its index contradicts itself", "")
            if piece.is_cuda:
                self._fetch(piece, chunk)
            else:
                self._ask(piece, chunk, None)

    def _ask(self, piece: Tensor, chunk: tf.Chunk, then: Any) -> None:
        while len(self._waiting) >= _IN_FLIGHT:
            self._wait_one()
        ticket = self.queue.submit_read(piece, self.file, chunk.offset)

        def after() -> None:
            if tf.digest(piece.numpy()) != chunk.digest:
                what = f"{self.file.path} is damaged between bytes {chunk.offset} and {chunk.offset + chunk.nbytes}"
                raise CorruptFile(what, "its digest differs from the one it was saved with", "restore it from a copy")
            if then is not None:
                then()

        self._waiting.append((ticket, after))

    def _fetch(self, piece: Tensor, chunk: tf.Chunk) -> None:
        while len(self._waiting) + len(self._copies) >= _ROOMS:
            self._reclaim() if self._copies else self._wait_one()
        room = self._room()
        part = room[: piece.numel()]

        def upload() -> None:
            piece.copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(piece.device))
            self._copies.append((room, event))

        self._ask(part, chunk, upload)

    def _reclaim(self) -> None:
        room, event = self._copies.popleft()
        event.synchronize()
        self._rooms.append(room)

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._drain()
        finally:
            self._abandon()
            while self._copies:  # pinned rooms go when the copies out of them are done
                self._reclaim()
