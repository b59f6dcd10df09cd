"""``async_io`` under DeepSpeed's names: ``aio_handle``, ``aio_read``, ``aio_write``, ``deepspeed_memcpy``.

Argument order, keywords (``example_tenosr`` is spelt so there) and return values are DeepSpeed's; what fails raises
instead of returning -1. :class:`deepspeed_ops.aio.IoQueue` is the plainer interface underneath.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops import pin_memory
from deepspeed_ops.aio import IoQueue, backends
from deepspeed_ops.aio_memory import memory_of
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DtypeError, IoFailed, TensorError

__all__ = ["aio_handle", "aio_read", "aio_write", "backends", "deepspeed_memcpy", "module"]
OP = "async_io"
_DIRECT_UNIT = 512  # bytes; what DeepSpeed's get_alignment() counts in


def module() -> ModuleType:
    """What ``AsyncIOBuilder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module(OP)
    return sys.modules[__name__]


class aio_handle:
    """DeepSpeed's handle: reads and writes whole tensors, at once or asynchronously.

    Args:
        block_size: most bytes of one transfer.
        queue_depth: transfers in flight a thread; cut to what the kernel grants.
        single_submit: a system call a transfer, in place of one for many.
        overlap_events: kept for DeepSpeed's signature. Submission and completion always overlap.
        intra_op_parallelism: threads that work on one request.
        backend: ours. ``io_uring``, ``libaio`` or ``threads`` forces one, ``auto`` takes the first of these that works;
            default: what ``DS_AIO_BACKEND`` says, else ``auto``.

    Raises:
        UsageError: an argument out of range.
    """

    _op = OP

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        backend: str | None = None,
    ) -> None:
        self._queue = IoQueue(block_size, queue_depth, intra_op_parallelism, single_submit, backend, self._op)
        self._facts = (int(block_size), int(queue_depth), bool(single_submit), bool(overlap_events))
        self._parallelism = int(intra_op_parallelism)

    # --- what it was made with ---

    def get_block_size(self) -> int:
        """Most bytes of one transfer."""
        return self._facts[0]

    def get_queue_depth(self) -> int:
        """Transfers in flight a thread, as asked for; ``backend_trace`` tells where the kernel grants less."""
        return self._facts[1]

    def get_single_submit(self) -> bool:
        """Whether each transfer is a system call of its own."""
        return self._facts[2]

    def get_overlap_events(self) -> bool:
        """As given; submission and completion overlap either way."""
        return self._facts[3]

    def get_intra_op_parallelism(self) -> int:
        """Threads that work on one request."""
        return self._parallelism

    def get_alignment(self) -> int:
        """``intra_op_parallelism * 512``, which DeepSpeed asks sizes to be a multiple of. Here any size will do."""
        return self._parallelism * _DIRECT_UNIT

    @property
    def backend(self) -> str:
        """The backend in use."""
        return self._queue.backend

    @property
    def backend_trace(self) -> tuple[str, ...]:
        """A line for every backend: chosen or not, and why; and what the kernel did not grant."""
        return self._queue.backend_trace

    # --- one after the other ---

    def read(self, buffer: Any, filename: Any, validate: bool, file_offset: int = 0) -> int:
        """Fill ``buffer`` (mutated) from a file; returns 0.

        Args:
            buffer: contiguous tensor on the CPU or a GPU, any dtype, size and address.
            filename: the file, at least ``file_offset`` plus the buffer's bytes long.
            validate: read the bytes once more by another way and compare.
            file_offset: position in the file, bytes.

        Raises:
            IoFailed: the file cannot be read, ends too early, or ``validate`` found other bytes.
            TensorError, UsageError: an argument that cannot be used.
        """
        self._checked(buffer, filename, file_offset, validate, self._queue.read(buffer, filename, file_offset))
        return 0

    def write(self, buffer: Any, filename: Any, validate: bool, file_offset: int = 0, fsync: bool = False) -> int:
        """Write all of ``buffer`` to a file, created where it does not exist, never truncated; returns 0.

        Args:
            buffer, filename, validate, file_offset: as for :meth:`read`.
            fsync: ours. Flush the file to its device before returning.

        Raises:
            IoFailed: the file cannot be written, or ``validate`` found other bytes.
            TensorError, UsageError: an argument that cannot be used.
        """
        moved = self._queue.write(buffer, filename, file_offset, sync=fsync)
        self._checked(buffer, filename, file_offset, validate, moved)
        return 0

    def sync_pread(self, buffer: Any, filename: Any, file_offset: int = 0) -> int:
        """:meth:`read` without validation; returns the number of requests done, 1."""
        self._queue.read(buffer, filename, file_offset)
        return 1

    def sync_pwrite(self, buffer: Any, filename: Any, file_offset: int = 0, fsync: bool = False) -> int:
        """:meth:`write` without validation; returns the number of requests done, 1."""
        self._queue.write(buffer, filename, file_offset, sync=fsync)
        return 1

    # --- asynchronously ---

    def pread(self, buffer: Any, filename: Any, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """:meth:`async_pread` where ``async_op``, else :meth:`sync_pread` with ``validate``."""
        if async_op:
            return self.async_pread(buffer, filename, file_offset)
        self.read(buffer, filename, validate, file_offset)
        return 1

    def pwrite(
        self, buffer: Any, filename: Any, validate: bool, async_op: bool, file_offset: int = 0, fsync: bool = False
    ) -> int:
        """:meth:`async_pwrite` where ``async_op``, else :meth:`sync_pwrite` with ``validate``."""
        if async_op:
            return self.async_pwrite(buffer, filename, file_offset, fsync=fsync)
        self.write(buffer, filename, validate, file_offset, fsync)
        return 1

    def async_pread(self, buffer: Any, filename: Any, file_offset: int = 0) -> int:
        """Start filling ``buffer``; returns 0. The handle keeps it alive until :meth:`wait`."""
        self._queue.submit_read(buffer, filename, file_offset)
        return 0

    def async_pwrite(
        self, buffer: Any, filename: Any = None, file_offset: int = 0, *, fd: int | None = None, fsync: bool = False
    ) -> int:
        """Start writing ``buffer``; returns 0. The handle keeps it alive until :meth:`wait`.

        Args:
            buffer: must not change until :meth:`wait`.
            filename: a path, or a descriptor open for writing.
            file_offset: position in the file, bytes.
            fd: DeepSpeed's keyword for a descriptor. It stays the caller's, who may close it at once.
            fsync: ours. Flush the file to its device before the request counts as done.
        """
        self._queue.submit_write(buffer, filename if fd is None else fd, file_offset, sync=fsync)
        return 0

    def wait(self) -> int:
        """Wait for everything started asynchronously; returns how many requests that were.

        Raises:
            IoFailed: at least one failed; the first failure, raised after all are done.
        """
        return self._queue.wait_all()

    # --- locked memory ---

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: Tensor) -> Tensor:
        """A locked, page-aligned tensor of ``num_elem`` zeros; see :class:`deepspeed_ops.pin_memory.pin_handle`."""
        return pin_memory.pin_handle().new_cpu_locked_tensor(num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Unlock it; False for a tensor that is not locked (any more)."""
        return pin_memory.pin_handle().free_cpu_locked_tensor(locked_tensor)

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether a tensor's memory cannot be swapped out."""
        return pin_memory.is_pinned(buffer)

    # --- the end; ours ---

    def close(self) -> None:
        """Wait for what is in flight and give everything back; afterwards every call raises. Twice is once."""
        self._queue.close()

    def __enter__(self) -> aio_handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, buffer: Any, filename: Any, offset: int, validate: bool, length: int) -> None:
        if validate:
            compare(self._op, buffer, filename, offset, length)


def compare(op: str, buffer: Any, filename: Any, offset: int, length: int) -> None:
    """Compare a buffer with a file, read through the page cache.

    Raises:
        IoFailed: a byte differs; its position stands in the message.
    """
    owner: Any = buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy() if isinstance(buffer, Tensor) else buffer
    view = memoryview(owner).cast("B")
    with Path(os.fsdecode(filename)).open("rb") as file:
        file.seek(offset)
        for start in range(0, length, 1 << 20):
            part = file.read(min(1 << 20, length - start))
            mine = bytes(view[start : start + min(1 << 20, length - start)])
            if part != mine:
                pairs = enumerate(zip(part, mine, strict=False))
                at = offset + start + next((i for i, (a, b) in pairs if a != b), len(part))
                what = f"{op}: {filename} differs from the buffer of {length} bytes at offset {offset}"
                raise IoFailed(
                    what, f"the first difference is at byte {at}", filename=str(filename), offset=offset, length=length
                )


def aio_read(
    buffer: Any,
    filename: Any,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill ``buffer`` (mutated) from the beginning of a file; returns 0. See :class:`aio_handle` for all of it."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: Any,
    filename: Any,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write ``buffer`` to the beginning of a file; returns 0. See :class:`aio_handle` for all of it."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy ``src`` into ``dest`` (mutated) on several threads; returns 0.

    Args:
        dest: contiguous CPU tensor.
        src: contiguous CPU tensor of the same dtype and number of elements, that shares no memory with ``dest``.

    Raises:
        TensorError: a size, layout, device or overlap that does not go.
        DtypeError: the dtypes differ.
    """
    to, origin = memory_of("deepspeed_memcpy", dest, True), memory_of("deepspeed_memcpy", src, False)
    if dest.dtype != src.dtype:
        raise DtypeError(f"deepspeed_memcpy: dest is {dest.dtype} and src {src.dtype}", "expected one dtype", "")
    if to.length != origin.length or to.device >= 0 or origin.device >= 0:
        what = f"deepspeed_memcpy: dest is {tuple(dest.shape)} on {dest.device}, src {tuple(src.shape)} on {src.device}"
        raise TensorError(what, "expected as many elements, on the CPU", "dest.copy_(src)")
    if to.address < origin.address + origin.length and origin.address < to.address + to.length:
        raise TensorError("deepspeed_memcpy: dest and src share memory", "they are copied in parallel", "src.clone()")
    loader.host_module(OP).copy_memory(to.address, origin.address, to.length, torch.get_num_threads())
    return 0
