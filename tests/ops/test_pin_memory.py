"""``pin_memory``: locked tensors are page-aligned, belong to Python objects, and are known to every handle."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed_ops.op_builder.errors import OpsError, TensorError, UsageError

from deepspeed_ops import async_io, pin_memory

PAGE = os.sysconf("SC_PAGESIZE")


def locked_kib() -> int:
    """What the kernel says this process has locked."""
    found = re.search(r"VmLck:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 1000, 100_003])
def test_a_locked_tensor_is_what_was_asked_for(dtype: torch.dtype, count: int) -> None:
    """Fault: another size or dtype, an address inside a page, memory that another op does not know."""
    handle = pin_memory.pin_handle()
    tensor = handle.new_cpu_locked_tensor(count, torch.empty(3, dtype=dtype))
    assert tensor.dtype is dtype and tensor.shape == (count,) and not tensor.any()
    if count:
        assert tensor.data_ptr() % PAGE == 0
        for other in (pin_memory.pin_handle(), async_io.aio_handle()):
            assert other.is_pinned(tensor) and other.is_pinned(tensor[count // 2 :])
        assert not handle.is_pinned(torch.empty(5)), "plain memory"
        assert handle.free_cpu_locked_tensor(tensor)
        assert not handle.is_pinned(tensor)


def test_the_kernel_agrees_and_nothing_leaks() -> None:
    """Fault: memory that is not locked, or never given back: by views, by dropping, by freeing."""
    handle, before = pin_memory.pin_handle(), locked_kib()
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0))
    assert locked_kib() - before >= 4096
    view = tensor.view(2, -1)[1]
    view.fill_(3.0)
    del tensor
    gc.collect()
    assert locked_kib() - before >= 4096 and handle.is_pinned(view), "a view keeps it"
    del view
    gc.collect()
    assert locked_kib() == before
    for _ in range(200):
        handle.new_cpu_locked_tensor(1 << 18, torch.empty(0))
    gc.collect()
    assert locked_kib() == before


def test_a_freed_tensor_stays_readable_and_a_second_free_is_refused() -> None:
    """Fault: a tensor whose memory is gone; a double free."""
    handle = pin_memory.pin_handle()
    tensor = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.int32))
    tensor.copy_(torch.arange(5000))
    address = tensor.data_ptr()
    assert handle.free_cpu_locked_tensor_by_ptr(address)
    assert not handle.free_cpu_locked_tensor_by_ptr(address) and not handle.free_cpu_locked_tensor(tensor)
    assert torch.equal(tensor, torch.arange(5000, dtype=torch.int32))
    assert not handle.free_cpu_locked_tensor(torch.empty(4)), "never locked"
    assert not handle.free_cpu_locked_tensor_by_ptr(0)


def test_bad_arguments_are_refused() -> None:
    """Fault: a negative size becomes a huge one; an example that is none."""
    handle = pin_memory.pin_handle()
    with pytest.raises(UsageError, match="num_elem=-1"):
        handle.new_cpu_locked_tensor(-1, torch.empty(0))
    with pytest.raises(UsageError, match=r"num_elem=1\.5"):
        handle.new_cpu_locked_tensor(1.5, torch.empty(0))  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="example is a str"):
        handle.new_cpu_locked_tensor(1, "float32")  # type: ignore[arg-type]
    with pytest.raises(OpsError, match=r"cannot be locked\n  why: ENOMEM"):
        handle.new_cpu_locked_tensor(1 << 50, torch.empty(0))


LIMITED = """
import ctypes, resource, sys, torch
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
libc = ctypes.CDLL(None, use_errno=True)
class Cap(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
libc.capset(ctypes.byref(Cap(0x20080522, 0)), (ctypes.c_uint32 * 6)())
from deepspeed_ops import pin_memory
try:
    pin_memory.pin_handle().new_cpu_locked_tensor(1 << 20, torch.empty(0))
except pin_memory.OpsError as exc:
    print(exc)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux'")
def test_the_limit_is_told_with_its_cure() -> None:
    """Fault: memory that only seems locked, where a container allows little of it."""
    pin_memory.module()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, encoding="utf-8", errors="replace", timeout=120, check=False,
    )  # fmt: skip
    assert "mlock" in done.stdout and "ulimit -l" in done.stdout, done.stdout + done.stderr


def test_a_child_of_fork_has_nothing_locked() -> None:
    """Fault: locks are not inherited, and the child believes they are."""
    handle = pin_memory.pin_handle()
    tensor = handle.new_cpu_locked_tensor(4096, torch.empty(0))
    child = os.fork()
    if child == 0:
        good = not handle.is_pinned(tensor) and handle.is_pinned(handle.new_cpu_locked_tensor(10, tensor))
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert handle.is_pinned(tensor)
