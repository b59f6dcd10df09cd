"""Many reads and writes of files at once: :class:`IoQueue`.

    with IoQueue(queue_depth=64) as queue, queue.open("state.bin", write=True) as file:
        tickets = [queue.submit_write(tensor, file, offset) for tensor, offset in plan]
        ...                       # compute; the queue's threads write
        for ticket in tickets:
            queue.wait(ticket)    # bytes, or IoFailed with errno, filename, offset and length

A buffer is any contiguous tensor or view of one (CPU, pinned or CUDA, any dtype), or an object with a buffer. A file
is an :class:`OpenFile`, a path, or a descriptor that the caller has open. Offsets and sizes are bytes, of any
alignment. ``read`` and ``write`` are the same in one call, done in the calling thread.

Promises: writing never truncates and never changes a byte outside the request, also where two requests in flight share
a block of the file; a read gives all bytes or raises; a buffer lives until its request is done; requests in flight are
not ordered, so two that touch the same bytes must be waited for in between. The GIL is released while anything waits.
Descriptors, threads and rings go when the queue is closed or collected; both wait for what is in flight. After ``fork``
a child may use the queue for new requests; tickets belong to the process that got them. A write into the page cache or
a disk's cache is not durable: ``sync=True`` flushes the file before a request is done. Extending a file makes the
kernel do direct writes one after the other: preallocate it (``os.posix_fallocate``) for speed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import Any, NamedTuple

from deepspeed_ops.aio_memory import Memory, memory_of
from deepspeed_ops.aio_native import MOST, FileArgs, Outcome, QueueArgs, RequestArgs, backend_code, failed, whole
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import IoFailed, UsageError

_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()


class OpenFile:
    """A file that many requests use; made by :meth:`IoQueue.open`.

    Attributes:
        path: as given, or ``descriptor N``.
        writable: opened for writing; otherwise for reading.
        direct: whether its aligned part goes around the page cache.
        alignment: of positions and lengths that go around it, bytes.
    """

    def __init__(self, op: str, file: Any, write: bool, direct: bool = True) -> None:
        self._module = loader.host_module(op)
        self.path, self.writable = _name_of(op, file), write
        args = FileArgs(write=write, direct=direct)
        if isinstance(file, int):
            args.descriptor = _system_descriptor(file)
        else:
            args.path = ctypes.cast(ctypes.c_char_p(encoded := _encoded(op, file)), ctypes.c_void_p).value or 0
        self._module.open_file(ctypes.addressof(args))
        if args.outcome.code:
            raise failed(op, "open", self.path, 0, 0, args.outcome)
        if not isinstance(file, int):
            del encoded
        self.number = int(args.file)
        self.direct, self.alignment = bool(args.is_direct), int(args.alignment)
        self._close = weakref.finalize(self, self._module.close_file, self.number)

    def size(self) -> int:
        """Bytes in the file now."""
        return int(self._module.file_size(self.number))

    def close(self) -> None:
        """Close it, once requests in flight are done with it. A second call does nothing."""
        self._close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._close.alive

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class IoQueue:
    """Reads and writes in flight together.

    Args:
        block_size: most bytes of one transfer; a request is cut into such.
        queue_depth: transfers in flight a thread; cut to what the kernel grants.
        threads: threads that work on requests (with the ``threads`` backend and on file systems without direct I/O: at
            least ``min(queue_depth, 16)``, since there a thread does one transfer at a time).
        single_submit: a system call a transfer, in place of one for many.
        backend: ``io_uring``, ``libaio`` or ``threads`` forces one; ``auto`` takes the first of these that works; None:
            what ``DS_AIO_BACKEND`` says, else ``auto``.
        op: the op whose library does it, ``async_io`` or ``gds``.

    Raises:
        UsageError: an argument out of range.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        threads: int = 1,
        single_submit: bool = False,
        backend: str | None = None,
        op: str = "async_io",
    ) -> None:
        self._op, self._module = op, loader.host_module(op)
        args = QueueArgs(
            whole(op, "block_size", block_size, 1),
            whole(op, "queue_depth", queue_depth, 1),
            whole(op, "threads", threads, 1),
            bool(single_submit),
            backend_code(op, backend),
        )
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._number = int(self._module.open_queue(ctypes.addressof(args)))
        # The buffers are among the arguments: they live until the library has let go of them.
        self._close = weakref.finalize(self, _close_queue, self._module, self._number, self._pending)
        _queues.add(self)

    # --- what serves it ---

    @property
    def backend(self) -> str:
        """The backend in use."""
        return str(self._module.queue_backend(self._open_number()))

    @property
    def backend_trace(self) -> tuple[str, ...]:
        """A line for every backend that was looked at: chosen or not, and why; and what the kernel did not grant."""
        return tuple(str(self._module.queue_trace(self._open_number())).splitlines())

    # --- files ---

    def open(self, file: Any, write: bool = False, direct: bool = True) -> OpenFile:
        """Open a file for many requests.

        Args:
            file: a path, or a descriptor (which stays the caller's).
            write: for writing, created where it does not exist (mode 0600), never truncated; otherwise for reading.
            direct: go around the page cache where the file system can.

        Raises:
            IoFailed: it cannot be opened, or is neither a regular file nor a block device.
        """
        self._open_number()
        return OpenFile(self._op, file, write, direct)

    # --- one after the other ---

    def read(self, buffer: Any, file: Any, offset: int = 0) -> int:
        """Fill ``buffer`` (mutated) with the bytes of ``file`` from ``offset`` on; returns how many.

        Raises:
            IoFailed: the file cannot be read, or ends too early.
            TensorError, UsageError: an argument that cannot be used.
        """
        return self._run(buffer, file, offset, False, False)

    def write(self, buffer: Any, file: Any, offset: int = 0, *, sync: bool = False) -> int:
        """Write all of ``buffer`` to ``file`` at ``offset``; returns how many bytes.

        Args:
            buffer: what is written.
            file: created where it does not exist, extended where it is too short, never truncated.
            offset: position in the file, bytes.
            sync: flush the file to its device before returning.

        Raises:
            IoFailed: the file cannot be written; what was written before the failure stays.
            TensorError, UsageError: an argument that cannot be used.
        """
        return self._run(buffer, file, offset, True, sync)

    # --- many at once ---

    def submit_read(self, buffer: Any, file: Any, offset: int = 0) -> int:
        """Start :meth:`read`; returns a ticket for :meth:`wait`. ``buffer`` is the library's until then."""
        return self._submit(buffer, file, offset, False, False)

    def submit_write(self, buffer: Any, file: Any, offset: int = 0, *, sync: bool = False) -> int:
        """Start :meth:`write`; returns a ticket for :meth:`wait`. ``buffer`` must not change until then."""
        return self._submit(buffer, file, offset, True, sync)

    def wait(self, ticket: int) -> int:
        """Wait for one request; returns its bytes.

        Raises:
            IoFailed: it failed.
            UsageError: the ticket is not in flight: waited for already, or of another process.
        """
        outcome = Outcome()
        number = self._open_number()
        pending = self._pending.get(ticket)
        if pending is None or not self._module.finish_request(number, ticket, ctypes.addressof(outcome)):
            raise UsageError(f"{self._op}: ticket {ticket} is not in flight", "it was waited for, or is not ours", "")
        with self._lock:
            self._pending.pop(ticket, None)
        if outcome.code:
            raise pending.failed(self._op, outcome)
        return outcome.moved

    def done(self, ticket: int) -> bool:
        """Whether :meth:`wait` would return at once."""
        return bool(self._module.request_is_finished(self._open_number(), ticket))

    @property
    def pending(self) -> tuple[int, ...]:
        """Tickets that nobody has waited for yet, oldest first."""
        with self._lock:
            return tuple(self._pending)

    def wait_all(self) -> int:
        """Wait for every request; returns how many there were.

        Raises:
            IoFailed: at least one failed; the first failure, raised after all are done.
        """
        self._open_number()
        tickets, failures = self.pending, []
        for ticket in tickets:
            try:
                self.wait(ticket)
            except OSError as exc:
                failures.append(exc)
        if failures:
            if len(failures) > 1 and hasattr(failures[0], "add_note"):
                failures[0].add_note(f"{len(failures) - 1} more of {len(tickets)} requests failed")
            raise failures[0]
        return len(tickets)

    # --- the end ---

    def close(self) -> None:
        """Wait for what is in flight, then give everything back. Failures nobody waited for are lost. Twice is once."""
        self._close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._close.alive

    def __enter__(self) -> IoQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait_all()
        finally:
            self.close()

    # --- inside ---

    def _open_number(self) -> int:
        if not self._close.alive:
            raise UsageError(f"{self._op}: the handle is closed", "nothing can be asked of it any more", "make another")
        return self._number

    def _file(self, file: Any, write: bool) -> OpenFile:
        """The file itself where it is open, else one that is ours to close."""
        if not isinstance(file, OpenFile):
            return OpenFile(self._op, file, write)
        if file.closed or file.writable != write:
            why = "it is closed" if file.closed else f"it was opened for {'writing' if file.writable else 'reading'}"
            raise UsageError(f"{self._op}: {file.path} cannot be {'written' if write else 'read'}", why, "")
        return file

    def _request(self, buffer: Any, file: Any, offset: int, write: bool, sync: bool) -> tuple[RequestArgs, _Pending]:
        number, at = self._open_number(), whole(self._op, "file_offset", offset, 0)
        memory = memory_of(self._op, buffer, not write)
        if at > MOST - memory.length:
            raise UsageError(f"{self._op}: file_offset={at}", f"{memory.length} bytes from there end beyond 2**63", "")
        opened = self._file(file, write)
        args = RequestArgs(
            number, opened.number, write, memory.address, memory.length, at, sync, memory.device, memory.stream
        )
        return args, _Pending(write, at, memory, opened)

    def _run(self, buffer: Any, file: Any, offset: int, write: bool, sync: bool) -> int:
        args, pending = self._request(buffer, file, offset, write, sync)
        try:
            self._module.run_request(ctypes.addressof(args))
        finally:
            if pending.file is not file:
                pending.file.close()
        outcome = args.outcome
        if outcome.code:
            raise pending.failed(self._op, outcome)
        return outcome.moved

    def _submit(self, buffer: Any, file: Any, offset: int, write: bool, sync: bool) -> int:
        args, pending = self._request(buffer, file, offset, write, sync)
        try:
            with self._lock:  # a ticket is known here before anybody can wait for it
                ticket = int(self._module.start_request(ctypes.addressof(args)))
                if ticket:
                    self._pending[ticket] = pending
        finally:
            if pending.file is not file:
                pending.file.close()
        if not ticket:
            raise pending.failed(self._op, args.outcome)
        return ticket


class _Pending(NamedTuple):
    """What a request in flight needs to live, and what its failure will be told with."""

    write: bool
    offset: int
    memory: Memory
    file: OpenFile

    def failed(self, op: str, outcome: Outcome) -> IoFailed:
        what = "write" if self.write else "read"
        return failed(op, what, self.file.path, self.offset, self.memory.length, outcome)


def backends(op: str = "async_io") -> dict[str, tuple[bool, str]]:
    """Every backend by name, best first: whether it works here, and what was found."""
    lines = (line.split(": ", 2) for line in str(loader.host_module(op).backends()).splitlines())
    return {name: (works == "yes", why) for name, works, why in lines}


def _close_queue(module: Any, number: int, pending: dict[int, _Pending]) -> None:
    module.close_queue(number)
    pending.clear()


def _name_of(op: str, file: Any) -> str:
    if isinstance(file, int) and not isinstance(file, bool):
        return f"descriptor {file}"
    try:
        return os.fsdecode(file)
    except TypeError as exc:
        why = "expected a path, a descriptor or an open file"
        raise UsageError(f"{op}: the file is a {type(file).__name__}", why, "") from exc


def _encoded(op: str, file: Any) -> bytes:
    path = os.fsencode(file)
    if b"\0" in path:
        raise UsageError(f"{op}: the path {os.fsdecode(path)!r} holds a NUL", "no file has such a name", "")
    return path


def _system_descriptor(descriptor: int) -> int:
    if sys.platform == "win32":
        import msvcrt

        return int(msvcrt.get_osfhandle(descriptor))
    return descriptor


def _after_fork() -> None:
    """In a child: what the parent has in flight is not ours to wait for."""
    for queue in tuple(_queues):
        queue._lock = threading.Lock()
        queue._pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
