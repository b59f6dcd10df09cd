"""``pin_memory``: page-aligned tensors whose memory is locked, under DeepSpeed's names.

The memory belongs to the tensor's storage and goes with the last view of it. ``free_cpu_locked_tensor`` gives up the
lock at once, so that nobody is left with a tensor whose memory is gone.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import sys
import threading
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.aio_native import whole
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import OpsError, TensorError

OP = "pin_memory"


def module() -> ModuleType:
    """What ``PinMemoryBuilder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module(OP)
    return sys.modules[__name__]


class _Run(ctypes.Structure):
    """``ds::Run``."""

    bytes: int
    mapping: int
    address: int
    page: int
    _fields_ = [(name, ctypes.c_int64) for name in ("bytes", "mapping", "address", "page")]


class _Locked:
    """The locked runs of this process: one list for every handle of every op."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}

    def add(self, address: int, length: int) -> None:
        with self._lock:
            bisect.insort(self._starts, address)
            self._lengths[address] = length

    def take(self, address: int) -> int | None:
        """Length of the run that begins there, which is in the list no more; None where none does."""
        with self._lock:
            length = self._lengths.pop(address, None)
            if length is not None:
                self._starts.remove(address)
            return length

    def holds(self, address: int, length: int) -> bool:
        with self._lock:
            place = bisect.bisect_right(self._starts, address) - 1
            if place < 0:
                return False
            start = self._starts[place]
            return address + length <= start + self._lengths[start]

    def forget(self) -> None:
        """In a child of fork, where nothing is locked."""
        self.__init__()  # type: ignore[misc]


_locked = _Locked()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locked.forget)


def new_locked(num_elem: int, dtype: torch.dtype) -> Tensor:
    """A new one-dimensional tensor of zeros that begins at a page and stays in RAM.

    Args:
        num_elem: elements.
        dtype: theirs.

    Raises:
        OpsError: the system gives no memory, or locks no more of it.
    """
    library, count = loader.host_module(OP), whole(OP, "num_elem", num_elem, 0)
    if count == 0:
        return torch.empty(0, dtype=dtype)
    length = count * dtype.itemsize
    run = _Run(bytes=length)
    what = f"{OP}: {length} bytes cannot be locked"
    if code := int(library.map(ctypes.addressof(run))):
        raise OpsError(what, f"{errno.errorcode.get(code, code)}: {os.strerror(code)} (mmap)", "ask for less")
    # torch keeps the array alive with the storage, and the array's end unmaps the run.
    array = (ctypes.c_byte * length).from_address(run.address)
    pages = (length + run.page - 1) // run.page * run.page
    if code := int(library.lock(run.address, pages)):
        library.unmap(run.mapping, run.bytes)
        why = f"{errno.errorcode.get(code, code)}: {os.strerror(code)} (mlock)"
        raise OpsError(what, why, "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1")
    _locked.add(run.address, pages)
    weakref.finalize(array, _release, library, run.address, run.mapping, run.bytes)
    return torch.frombuffer(array, dtype=dtype, count=count)


def _release(library: Any, address: int, mapping: int, length: int) -> None:
    _locked.take(address)
    library.unmap(mapping, length)  # unlocks too


def unlock(address: int) -> bool:
    """Give up the lock of the run that begins at ``address``; False where none does (any more)."""
    length = _locked.take(address)
    if length is None:
        return False
    loader.host_module(OP).unlock(address, length)
    return True


class pin_handle:
    """DeepSpeed's handle. Every handle of the process knows every locked tensor, whichever op's handle made it."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A new locked tensor of ``num_elem`` zeros, one-dimensional, page-aligned, dtype of ``example_tensor``.

        Raises:
            OpsError: the system gives no memory, or locks no more of it.
        """
        return new_locked(num_elem, _dtype_of(example_tensor))

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Unlock the memory; it goes with the tensor's last view. False for a tensor that is not locked (any more)."""
        return isinstance(locked_tensor, Tensor) and self.free_cpu_locked_tensor_by_ptr(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """:meth:`free_cpu_locked_tensor` by the address of the tensor's first element."""
        return unlock(address)

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether a tensor's memory cannot be swapped out: torch pinned it, or it lies inside a locked tensor."""
        return is_pinned(buffer)


def is_pinned(buffer: Tensor) -> bool:
    """Whether torch pinned a tensor's memory, or it lies inside a tensor of :func:`new_locked`."""
    if not isinstance(buffer, Tensor) or buffer.device.type != "cpu" or buffer.layout is not torch.strided:
        return False
    if buffer.numel() and _locked.holds(*_span(buffer)):
        return True
    return bool(torch.cuda.is_available() and buffer.is_pinned())


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _dtype_of(example: Any) -> torch.dtype:
    if not isinstance(example, Tensor):
        raise TensorError(f"{OP}: the example is a {type(example).__name__}", "expected a tensor of the dtype", "")
    return example.dtype
