"""What the tests of ``async_io`` share: known bytes, places with and without direct I/O, backends of this host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_ops import aio

BACKENDS = ("io_uring", "libaio", "threads")


def available(backend: str) -> str:
    """The backend, or a skip with what was found."""
    works, why = aio.backends()[backend]
    if not works:
        pytest.skip(f"{backend} does not work here: {why}")
    return backend


def pattern(n: int, lead: int = 0) -> Tensor:
    """Bytes (31 i) mod 251, at an address that is ``lead`` bytes past an aligned one."""
    room = torch.empty(n + lead + 4096, dtype=torch.uint8)
    start = -room.data_ptr() % 4096 + lead
    tensor = room[start : start + n]
    tensor.copy_((torch.arange(n, dtype=torch.int64) * 31 % 251).to(torch.uint8))
    return tensor


def blank(n: int, lead: int = 0) -> Tensor:
    """0x55, as :func:`pattern` is laid."""
    tensor = pattern(n, lead)
    tensor.fill_(0x55)
    return tensor


def contents(path: Path) -> bytes:
    """The file, through the page cache."""
    return path.read_bytes()


def memory_folder() -> Path:
    """A folder on tmpfs, where direct I/O does nothing."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm on this system")
    return shm
