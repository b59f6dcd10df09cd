"""``async_io``: every size, offset, alignment, backend and file system gives the bytes of a plain read and write."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from io_files import BACKENDS, available, blank, contents, memory_folder, pattern

from deepspeed_ops import aio, async_io, gds
from deepspeed_ops.async_io import aio_handle

TAILS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 2**20 - 1, 2**20, 2**20 + 1)
BIG = 28_824_000


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that works here."""
    return available(str(request.param))


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk, and one on a file system without direct I/O."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory_folder(), prefix="ds-aio-") as name:
        yield Path(name)


# ---- the bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [0, 1, 64])
def test_tails_and_addresses(backend: str, folder: Path, lead: int) -> None:
    """Fault (DeepSpeed#1070, cucim#1107): a size that is no multiple of a sector is cut, padded or refused."""
    with aio_handle(65536, 8, backend=backend) as handle:
        for n in TAILS:
            path, wrote = folder / f"{n}", pattern(n, lead)
            assert handle.sync_pwrite(wrote, str(path)) == 1
            assert contents(path) == wrote.numpy().tobytes(), n
            got = blank(n, lead)
            assert handle.sync_pread(got, str(path)) == 1
            assert torch.equal(got, wrote), n


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_big_odd_size(backend: str, tmp_path: Path, parallelism: int) -> None:
    """Fault: sizes have to be divisible by the parallelism."""
    wrote, got = pattern(BIG), blank(BIG, 1)
    with aio_handle(1 << 20, 32, False, True, parallelism, backend=backend) as handle:
        assert handle.async_pwrite(wrote, str(tmp_path / "f")) == 0 and handle.wait() == 1
        assert handle.async_pread(got, str(tmp_path / "f")) == 0 and handle.wait() == 1
    assert torch.equal(got, wrote) and contents(tmp_path / "f") == wrote.numpy().tobytes()


@pytest.mark.parametrize("offset", [4096, 1, 65_000, 512, 100, 65_536, 70_001])
def test_only_the_bytes_asked_for_change(backend: str, folder: Path, offset: int) -> None:
    """Fault: an edge is written as a whole block, the file is truncated or grows too far."""
    path = folder / "f"
    for lead in (0, 3):
        path.write_bytes(b"\xaa" * 65536)
        wrote = pattern(5000, lead)
        with aio_handle(4096, 4, backend=backend) as handle:
            assert handle.sync_pwrite(wrote, path, offset) == 1
            expected = bytearray(b"\xaa" * 65536)
            expected.extend(bytes(max(0, offset + 5000 - len(expected))))
            expected[offset : offset + 5000] = wrote.numpy().tobytes()
            assert contents(path) == bytes(expected)
            got = blank(5000, lead)
            assert handle.sync_pread(got, path, offset) == 1 and torch.equal(got, wrote)


def test_requests_that_share_blocks_keep_each_others_bytes(backend: str, tmp_path: Path) -> None:
    """Fault: two read-modify-writes of one block in flight: the second undoes the first."""
    path, size, count = tmp_path / "f", 700, 400
    path.write_bytes(b"\xaa" * (size * count))
    parts = [torch.full((size,), i % 250, dtype=torch.uint8) for i in range(count)]
    with aio_handle(4096, 32, False, True, 4, backend=backend) as handle:
        for i in (*range(0, count, 2), *range(1, count, 2)):
            handle.async_pwrite(parts[i], path, size * i)
        assert handle.wait() == count
    assert contents(path) == b"".join(bytes([i % 250]) * size for i in range(count))


def test_direct_and_buffered_readers_agree(tmp_path: Path, backend: str) -> None:
    """Fault: the page cache keeps what direct writes replaced, or direct reads miss what waits in the page cache."""
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    with aio.IoQueue(65536, 8, backend=backend) as queue:
        for turn in range(1, 20):
            assert contents(path)[:10] == bytes([turn - 1]) * 10
            queue.write(torch.full(((1 << 20) - 3,), turn, dtype=torch.uint8), path, 0)
            assert contents(path)[: (1 << 20) - 3] == bytes([turn]) * ((1 << 20) - 3)
            with path.open("r+b") as file:
                file.seek(70_000)
                file.write(b"\xff" * 100)
            got = blank(1 << 20)
            queue.read(got, path)
            assert bytes(got[69_999:70_101].tolist()) == bytes([turn]) + b"\xff" * 100 + bytes([turn])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_every_dtype_and_view(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fault: bytes of another dtype; a view's offset forgotten."""
    tensor = (torch.arange(10_000) % 2).to(dtype).view(100, 100)
    with aio_handle() as handle:
        handle.sync_pwrite(tensor[3:7], tmp_path / "f")
        assert contents(tmp_path / "f") == tensor[3:7].reshape(-1).view(torch.uint8).numpy().tobytes()
        got = torch.zeros_like(tensor)
        handle.sync_pread(got[3:7], tmp_path / "f")
    assert torch.equal(got[3:7], tensor[3:7]) and not got[:3].any() and not got[7:].any()


def test_direct_io_is_really_used(tmp_path: Path) -> None:
    """Fault: everything goes through the page cache and nobody notices."""
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    with aio.IoQueue() as queue, queue.open(tmp_path / "f") as file:
        if not file.direct:
            pytest.skip("the file system of the temporary folder has no direct I/O")
        assert file.alignment % os.sysconf("SC_PAGESIZE") == 0 and file.size() == 1 << 20
        fds = sorted(Path("/proc/self/fdinfo").iterdir())
        flags = [int(p.read_text(encoding="ascii").split("flags:")[1].split()[0], 8) for p in fds if p.exists()]
        assert any(flag & os.O_DIRECT for flag in flags)
        with queue.open(tmp_path / "f", direct=False) as plain:
            assert not plain.direct


def test_pinned_memory_and_fsync(tmp_path: Path, backend: str) -> None:
    """Fault: locked tensors take another path than plain ones; the flush is forgotten or fails."""
    with aio_handle(backend=backend) as handle:
        tensor = handle.new_cpu_locked_tensor(300_001, torch.empty(0, dtype=torch.uint8))
        tensor.copy_(pattern(300_001))
        assert handle.sync_pwrite(tensor, tmp_path / "f", fsync=True) == 1
        assert handle.async_pwrite(tensor, tmp_path / "g", 5, fsync=True) == 0 and handle.wait() == 1
        got = handle.new_cpu_locked_tensor(300_001, tensor)
        assert handle.sync_pread(got, tmp_path / "g", 5) == 1 and torch.equal(got, tensor)


def test_descriptors(tmp_path: Path, backend: str) -> None:
    """Fault: the caller closes his descriptor while a request is in flight; a direct one cannot write an edge."""
    wrote = pattern(100_001)
    for flag in (0, getattr(os, "O_DIRECT", 0)):
        try:
            fd = os.open(tmp_path / f"f{flag}", os.O_WRONLY | os.O_CREAT | flag, 0o600)
        except OSError:
            pytest.skip("the file system of the temporary folder has no direct I/O")
        with aio_handle(4096, 8, backend=backend) as handle:
            assert handle.async_pwrite(buffer=wrote, fd=fd, file_offset=7) == 0
            os.close(fd)
            assert handle.wait() == 1
        assert contents(tmp_path / f"f{flag}")[7:] == wrote.numpy().tobytes()


# ---- DeepSpeed's interface --------------------------------------------------------------------------------------


def test_argument_order_and_return_values(tmp_path: Path) -> None:
    """Fault: code written for DeepSpeed passes its arguments by position and looks at what comes back."""
    handle = aio_handle(4096, 16, True, False, 2)
    assert handle.get_block_size() == 4096 and handle.get_queue_depth() == 16 and handle.get_single_submit() is True
    assert handle.get_overlap_events() is False and handle.get_intra_op_parallelism() == 2
    assert handle.get_alignment() == 1024
    tensor, path = pattern(10_000), str(tmp_path / "f")
    assert handle.write(tensor, path, True) == 0 and handle.write(tensor, path, True, 100) == 0
    got = blank(10_000)
    assert handle.read(got, path, True, 100) == 0 and torch.equal(got, tensor)
    assert handle.pwrite(tensor, path, True, False) == 1 and handle.pwrite(tensor, path, False, True, 0) == 0
    assert handle.wait() == 1 and handle.wait() == 0
    assert handle.pread(got, path, True, False, 0) == 1 and handle.pread(got, path, False, True) == 0
    assert handle.async_pread(got, path) == 0 and handle.wait() == 2
    assert handle.sync_pwrite(buffer=tensor, filename=path, file_offset=0) == 1
    assert handle.sync_pread(buffer=got, filename=path, file_offset=0) == 1
    locked = handle.new_cpu_locked_tensor(num_elem=5, example_tenosr=torch.empty(0))
    assert handle.is_pinned(locked) and handle.free_cpu_locked_tensor(locked)
    assert async_io.aio_write(tensor, path, 4096, 4, False, True, True) == 0
    assert async_io.aio_read(got, path, 4096, 4, False, True, True) == 0
    assert handle.backend in BACKENDS and handle.backend_trace


def test_the_builders_return_this(tmp_path: Path) -> None:
    """Fault: DeepSpeed's module paths lead somewhere else."""
    from deepspeed.ops.aio import AsyncIOBuilder
    from deepspeed.ops.aio import async_io_op as op
    from deepspeed.ops.gds import GDSBuilder
    from deepspeed.ops.op_builder import AsyncIOBuilder as Again
    from deepspeed.ops.pin_memory import PinMemoryBuilder

    assert AsyncIOBuilder is Again and AsyncIOBuilder.BUILD_VAR == "DS_BUILD_AIO"
    assert AsyncIOBuilder().load().aio_handle is aio_handle and op.aio_handle is aio_handle
    assert AsyncIOBuilder().absolute_name() == "deepspeed.ops.aio.async_io_op"
    assert GDSBuilder().load().gds_handle is gds.gds_handle and GDSBuilder.BUILD_VAR == "DS_BUILD_GDS"
    assert PinMemoryBuilder().load().pin_handle().new_cpu_locked_tensor(3, torch.empty(0)).shape == (3,)
    ours, theirs = inspect.signature(gds.gds_handle.async_pwrite), inspect.signature(aio_handle.async_pwrite)
    assert ours == theirs


def test_validation_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a check that compares nothing."""
    tensor = pattern(3_000_000)
    handle = aio_handle()
    handle.sync_pwrite(tensor, tmp_path / "f")
    changed = bytearray(contents(tmp_path / "f"))
    changed[2_500_000] ^= 1
    (tmp_path / "f").write_bytes(bytes(changed))
    with pytest.raises(OSError, match="byte 2500000"):
        async_io.compare("async_io", tensor, tmp_path / "f", 0, tensor.numel())


@pytest.mark.parametrize("n", [0, 1, 7, 32, 1000, 1_000_003])
def test_memcpy_stays_inside(n: int) -> None:
    """Fault: DeepSpeed's rounds up and writes past the end (32 floats at n=32, 24 at n=1000)."""
    room, src = torch.full((n + 64,), -1.0), torch.rand(n)
    assert async_io.deepspeed_memcpy(room[:n], src) == 0
    assert torch.equal(room[:n], src) and bool((room[n:] == -1).all())
    wide = torch.arange(n, dtype=torch.int64)
    assert async_io.deepspeed_memcpy(into := torch.zeros_like(wide), wide) == 0 and torch.equal(into, wide)


# ---- the plain interface ----------------------------------------------------------------------------------------


def test_tickets(tmp_path: Path, backend: str) -> None:
    """Fault: a ticket waits for another's request, or can be used twice."""
    parts = [pattern(10_000 + i) for i in range(50)]
    with aio.IoQueue(4096, 16, 2, backend=backend) as queue, queue.open(tmp_path / "f", write=True) as file:
        tickets = [queue.submit_write(p, file, 20_000 * i) for i, p in enumerate(parts)]
        assert queue.pending == tuple(tickets)
        for i in (*range(25, 50), *range(25)):
            assert queue.wait(tickets[i]) == 10_000 + i
        with pytest.raises(ValueError, match="not in flight"):
            queue.wait(tickets[0])
        got = [blank(len(p)) for p in parts]
        with queue.open(tmp_path / "f") as again:
            for i, g in enumerate(got):
                queue.submit_read(g, again, 20_000 * i)
        assert queue.wait_all() == 50 and queue.pending == ()
    assert all(torch.equal(g, p) for g, p in zip(got, parts, strict=True))
    data = bytearray(b"x" * 1000)
    with aio.IoQueue() as queue:
        assert queue.write(b"0123456789", tmp_path / "g", 3, sync=True) == 10
        assert queue.read(memoryview(data)[5:15], tmp_path / "g", 3) == 10 and data[4:16] == b"x0123456789x"
        assert queue.write(bytearray(), tmp_path / "h") == 0 and (tmp_path / "h").exists()


def test_what_serves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: nobody knows which backend ran, and a variable that is spelt wrong is ignored."""
    handle = aio_handle()
    assert handle.backend == next(n for n in BACKENDS if aio.backends()[n][0])
    assert [line.split(":")[0] for line in handle.backend_trace] == list(BACKENDS)
    assert sum(": chosen" in line for line in handle.backend_trace) == 1
    monkeypatch.setenv("DS_AIO_BACKEND", "threads")
    assert aio_handle().backend == "threads" and "asked for" in aio_handle().backend_trace[0]
    assert aio_handle(backend="auto").backend == handle.backend, "an argument comes before the variable"
    monkeypatch.setenv("DS_AIO_BACKEND", "uring")
    with pytest.raises(ValueError, match="DS_AIO_BACKEND='uring' names no backend"):
        aio_handle()


def test_a_depth_beyond_the_kernels_limit_is_cut_and_told(tmp_path: Path, backend: str) -> None:
    """Fault: io_setup fails, and with it everything."""
    handle = aio_handle(4096, 1_000_000, backend=backend)
    tensor, got = pattern(1_000_001), blank(1_000_001)
    handle.sync_pwrite(tensor, tmp_path / "f")
    handle.sync_pread(got, tmp_path / "f")
    assert torch.equal(got, tensor) and handle.get_queue_depth() == 1_000_000
    assert any("queue depth 1000000 is cut to" in line for line in handle.backend_trace)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_transfer_at_a_time_needs_no_queue_of_the_kernel(tmp_path: Path, backend: str) -> None:
    """Fault: a ring or a context for each handle that only ever moves one block, and two system calls for one."""
    tensor, got = pattern(16_384), blank(16_384)

    def run(depth: int, calls: str) -> tuple[str, ...]:
        with aio.IoQueue(4096 if depth == 1 else 1 << 20, depth, backend=backend) as queue:
            before = contexts()
            if calls == "run":
                queue.write(tensor, tmp_path / "f")
                queue.read(got.zero_(), tmp_path / "f")
            else:
                queue.wait(queue.submit_write(tensor, tmp_path / "f"))
                queue.wait(queue.submit_read(got.zero_(), tmp_path / "f"))
            assert torch.equal(got, tensor) and queue.backend == backend
            made = contexts() - before
            with queue.open(tmp_path / "f") as file:
                queued = file.direct and backend != "threads" and depth > 1 and calls == "submit"
            assert made == queued, f"{made} at depth {depth} with {calls}"
            return queue.backend_trace

    for calls in ("run", "submit"):
        told = any("queue depth 1: a transfer at a time" in line for line in run(1, calls))
        assert told == (backend != "threads")
        run(8, calls)


def contexts() -> int:
    """Rings and kernel AIO contexts of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    aios = sum(line.endswith("/[aio] (deleted)") for line in maps)
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return aios + sum("io_uring" in str(link.readlink()) for link in links)
