"""GPU memory through ``native/fake_gpu.cpp``: ``python gpu_stand_in.py OP FOLDER CUFILE`` prints the counters as JSON.

The stand-in is found as ``libcuda.so.1`` (and ``libcufile.so.0``) in ``LD_LIBRARY_PATH``; CUFILE is what
``cuFileDriverOpen`` answers.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed_ops.op_builder.errors import IoFailed
from io_files import blank, pattern

from deepspeed_ops import aio
from deepspeed_ops.aio_memory import Memory

FAR = 1 << 60


class OnDevice:
    """A tensor that counts as GPU memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def memory_of(op: str, buffer: Any, written_to: bool) -> Memory:
    """What :func:`deepspeed_ops.aio_memory.memory_of` says of a CUDA tensor on device 0 and stream 0."""
    return Memory(buffer.tensor.data_ptr() + FAR, buffer.tensor.nbytes, 0, 0, buffer)


def main(op: str, folder: str, cufile: int) -> dict[str, Any]:
    """Writes and reads of every kind; the counters afterwards."""
    gpu = ctypes.CDLL("libcuda.so.1")
    gpu.fake_cufile(cufile)
    aio.memory_of = memory_of  # type: ignore[assignment]
    path, seen = Path(folder) / "f", 0
    for backend in (name for name, (works, _) in aio.backends(op).items() if works):
        for block, depth, threads in ((4096, 4, 1), (65536, 8, 3)):
            with aio.IoQueue(block, depth, threads, backend=backend, op=op) as queue:
                for n, offset in ((0, 5), (1, 0), (4096, 0), (4096, 1), (50_001, 4096), (50_001, 65_000), (300_001, 1)):
                    path.write_bytes(b"\xaa" * 70_000)
                    sent, got = pattern(n, offset % 2), blank(n, offset % 3)
                    queue.write(OnDevice(sent), path, offset)
                    queue.wait(queue.submit_read(OnDevice(got), path, offset))
                    assert torch.equal(sent, got), (backend, block, n, offset)
                    expected = bytearray(b"\xaa" * 70_000)
                    expected.extend(bytes(max(0, offset - len(expected))))
                    expected[offset : offset + n] = sent.numpy().tobytes()
                    assert path.read_bytes() == bytes(expected), (backend, block, n, offset)
                    seen += 2
                if cufile or op == "async_io":
                    for work in (queue.write, queue.read):
                        gpu.fake_gpu_fail(ctypes.c_long(2))
                        try:
                            work(OnDevice(blank(300_001)), path)
                            raise AssertionError("the second copy was to fail")
                        except IoFailed as exc:
                            assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(exc), exc
                        gpu.fake_gpu_fail(ctypes.c_long(0))
    names = ("to_host", "to_device", "cufile_reads", "cufile_writes", "pinned", "streams", "events", "buffers", "files")
    return {"requests": seen, **{name: int(gpu.fake_gpu_count(i)) for i, name in enumerate(names)}}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
