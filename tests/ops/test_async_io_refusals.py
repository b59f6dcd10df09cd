"""``async_io``: what cannot be done raises with errno name, path, offset and length, and leaves nothing half done."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed_ops.op_builder.errors import DtypeError, IoFailed, TensorError, UsageError
from io_files import BACKENDS, available, blank, contents, pattern

from deepspeed_ops import aio
from deepspeed_ops.aio import IoQueue
from deepspeed_ops.async_io import aio_handle, deepspeed_memcpy


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that works here."""
    return available(str(request.param))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=30, check=False).returncode
    except OSError:
        done = 1
    if done:
        pytest.skip("a tmpfs cannot be mounted here (it takes root)")
    yield place
    subprocess.run(["umount", str(place)], timeout=30, check=True)


def both_ways(handle: aio_handle, tensor: torch.Tensor, path: Path, offset: int, write: bool) -> list[IoFailed]:
    """The failures of the synchronous and the asynchronous call."""
    found = []
    for way in ("sync", "async"):
        call = getattr(handle, f"{way}_{'pwrite' if write else 'pread'}")
        with pytest.raises(IoFailed) as caught:
            call(tensor, str(path), offset)
            handle.wait()
        found.append(caught.value)
        assert handle.wait() == 0, "a failure is told once"
    return found


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_missing_file(backend: str, tmp_path: Path) -> None:
    """Fault: -1, or a file that appears because it was read."""
    with aio_handle(backend=backend) as handle:
        for error in both_ways(handle, blank(100), tmp_path / "none", 7, False):
            assert error.errno == errno.ENOENT and error.filename == str(tmp_path / "none")
            assert (error.offset, error.length) == (0, 0) and "ENOENT" in str(error) and isinstance(error, OSError)
        for error in both_ways(handle, blank(100), tmp_path / "no" / "folder", 0, True):
            assert error.errno == errno.ENOENT
    assert list(tmp_path.iterdir()) == []


def test_a_directory_and_what_is_no_file(backend: str, tmp_path: Path) -> None:
    """Fault: a pipe that never opens, a device that is no disk."""
    os.mkfifo(tmp_path / "pipe")
    with aio_handle(backend=backend) as handle:
        for write in (False, True):
            for error in both_ways(handle, blank(100), tmp_path, 0, write):
                assert error.errno == errno.EISDIR
        for path in (tmp_path / "pipe", Path("/dev/zero")):
            for error in both_ways(handle, blank(100), path, 0, False):
                assert error.errno == errno.ESPIPE


def test_a_read_only_file(backend: str, tmp_path: Path) -> None:
    """Fault: written all the same, or a failure without a name. Root may write: then a descriptor says no."""
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    with aio_handle(backend=backend) as handle:
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(IoFailed, match="EBADF"):
            handle.async_pwrite(blank(10), fd=fd)
        os.close(fd)
        with pytest.raises(IoFailed, match="EBADF"):
            handle.async_pwrite(blank(10), fd=fd)
        appending = os.open(path, os.O_WRONLY | os.O_APPEND)
        with pytest.raises(IoFailed, match=r"EINVAL.*O_APPEND"):
            handle.async_pwrite(blank(10), fd=appending)
        os.close(appending)
        if os.getuid():
            path.chmod(0o400)
            for error in both_ways(handle, blank(10), path, 0, True):
                assert error.errno == errno.EACCES
    assert contents(path) == b"x" * 100


@pytest.mark.parametrize("lead", [0, 1])
def test_a_short_file(backend: str, tmp_path: Path, lead: int) -> None:
    """Fault: a short read that counts as done, or a buffer filled halfway without a word."""
    path = tmp_path / "f"
    path.write_bytes(bytes(10_000))
    with aio_handle(4096, 4, backend=backend) as handle:
        for n, offset in ((10_001, 0), (1, 10_000), (5000, 5001), (1, 1 << 40)):
            tensor = blank(n, lead)
            for error in both_ways(handle, tensor, path, offset, False):
                assert error.errno == errno.ENODATA and "ends at byte 10000" in str(error)
                assert (error.offset, error.length) == (offset, n)
            assert bool((tensor == 0x55).all()), "refused before any byte"


def test_a_file_that_shrinks_while_it_is_read(backend: str, tmp_path: Path) -> None:
    """Fault: an endless loop at the end of the file."""
    path = tmp_path / "f"
    path.write_bytes(bytes(4 << 20))
    with IoQueue(4096, 2, backend=backend) as queue, queue.open(path) as file:
        os.truncate(path, 4096)
        with pytest.raises(IoFailed, match="ENODATA: the file ends at byte 4096"):
            queue.read(blank(8192), file)
        assert queue.read(blank(4096), file) == 4096


def test_a_full_disk(backend: str, small_disk: Path) -> None:
    """Fault: a file that is shorter than what was written to it, with success."""
    with aio_handle(65536, 4, backend=backend) as handle:
        for error in both_ways(handle, pattern(4 << 20), small_disk / "f", 0, True):
            assert error.errno == errno.ENOSPC and "ENOSPC" in str(error) and "free space" in error.fix
            assert "at byte" in error.why and error.length == 4 << 20
        assert handle.sync_pwrite(pattern(1000), small_disk / "f") == 1, "the handle lives"


def test_a_limit_on_file_sizes(backend: str, tmp_path: Path) -> None:
    """Fault: SIGXFSZ, or a huge offset that wraps around."""
    with aio_handle(backend=backend) as handle:
        for offset in (1 << 62, (1 << 63) - 4096 - 1):
            for error in both_ways(handle, pattern(4096), tmp_path / "f", offset, True):
                assert error.errno in (errno.EFBIG, errno.EINVAL, errno.EOVERFLOW)
    assert contents(tmp_path / "f") == b""


# ---- arguments --------------------------------------------------------------------------------------------------


def test_offsets(tmp_path: Path) -> None:
    """Fault: a negative offset that becomes a huge one, a float that is cut."""
    handle = aio_handle()
    for offset, said in ((-1, "file_offset=-1"), (2**63, str(2**63)), (1.0, "1.0"), (True, "True"), ("0", "'0'")):
        for call in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.async_pwrite):
            with pytest.raises(UsageError, match=said):
                call(blank(10), str(tmp_path / "f"), offset)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="beyond"):
        handle.sync_pwrite(blank(10), tmp_path / "f", 2**63 - 5)
    assert not (tmp_path / "f").exists() and handle.wait() == 0


def test_constructor() -> None:
    """Fault: a block of 0 bytes that never ends, a negative number of threads."""
    for arguments, said in (
        ((0,), "block_size=0"),
        ((-1,), "block_size=-1"),
        ((4096, 0), "queue_depth=0"),
        ((4096, 1, False, False, 0), "threads=0"),
        ((4096.5,), "block_size=4096.5"),
    ):
        with pytest.raises(UsageError, match=said):
            aio_handle(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="backend='spdk' names no backend"):
        aio_handle(backend="spdk")
    assert aio_handle(1, 1).get_block_size() == 1


def test_buffers(tmp_path: Path) -> None:
    """Fault: a strided tensor whose copy is filled, a subclass or sparse tensor used by address."""
    handle, path = aio_handle(), tmp_path / "f"
    path.write_bytes(bytes(10_000))
    base = torch.zeros(20, 20)
    for bad in (
        base[:, ::2], base.t()[1:], torch.zeros(3, 3).to_sparse(), torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(5, device="meta"), "text", None, 5, torch.nn.utils.rnn.PackedSequence(base, torch.tensor([20])),
    ):  # fmt: skip
        for call in (handle.sync_pread, handle.async_pread, handle.sync_pwrite, handle.async_pwrite):
            with pytest.raises(TensorError):
                call(bad, path)
    with pytest.raises(TensorError, match="read-only"):
        handle.sync_pread(b"12345", path)
    with pytest.raises(UsageError, match="file is a list"):
        handle.sync_pread(base, [path])
    with pytest.raises(UsageError, match="NUL"):
        handle.sync_pread(base, "a\0b")
    assert contents(path) == bytes(10_000) and handle.wait() == 0


def test_memcpy_refuses() -> None:
    """Fault: dtypes and layouts are not looked at, and bytes are reinterpreted."""
    with pytest.raises(DtypeError):
        deepspeed_memcpy(torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(TensorError, match="as many elements"):
        deepspeed_memcpy(torch.zeros(4), torch.zeros(5))
    with pytest.raises(TensorError, match="strides"):
        deepspeed_memcpy(torch.zeros(4, 4).t(), torch.zeros(4, 4))
    with pytest.raises(TensorError, match="share memory"):
        deepspeed_memcpy((x := torch.zeros(8))[:6], x[2:])


# ---- lives ------------------------------------------------------------------------------------------------------


def test_a_closed_handle(backend: str, tmp_path: Path) -> None:
    """Fault: a use after free."""
    handle = aio_handle(backend=backend)
    handle.async_pwrite(pattern(3_000_000), tmp_path / "f")
    handle.close()
    handle.close()
    assert contents(tmp_path / "f") == pattern(3_000_000).numpy().tobytes(), "closing finishes what is in flight"
    for call in (
        handle.wait,
        lambda: handle.sync_pread(blank(1), tmp_path / "f"),
        lambda: handle.async_pwrite(blank(1), tmp_path / "f"),
        lambda: handle.backend,
    ):
        with pytest.raises(UsageError, match="closed"):
            call()
    queue = IoQueue()
    file = queue.open(tmp_path / "f")
    with pytest.raises(UsageError, match="opened for reading"):
        queue.write(blank(1), file)
    file.close()
    file.close()
    with pytest.raises(UsageError, match="it is closed"):
        queue.read(blank(1), file)
    with pytest.raises(UsageError, match="closed"):
        file.size()


def test_a_handle_closed_by_another_thread(tmp_path: Path, backend: str) -> None:
    """Fault: a call in one thread runs on memory that another gave back."""
    tensor = pattern(2_000_000)
    for _ in range(20):
        handle, seen = aio_handle(65536, 4, False, True, 2, backend=backend), []

        def work(handle: aio_handle = handle, seen: list[str] = seen) -> None:
            try:
                while True:
                    handle.sync_pwrite(tensor, tmp_path / "f")
            except UsageError as exc:
                seen.append(str(exc))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        handle.close()
        for thread in threads:
            thread.join(60)
        assert len(seen) == 2 and all("closed" in text for text in seen)


def test_a_buffer_dropped_in_flight_lives_on(tmp_path: Path, backend: str) -> None:
    """Fault: the kernel writes into memory that belongs to somebody else by then."""
    (tmp_path / "f").write_bytes(pattern(1 << 20).numpy().tobytes())
    with aio_handle(4096, 4, backend=backend) as handle:
        for _ in range(10):
            handle.async_pread(torch.empty(1 << 20, dtype=torch.uint8), tmp_path / "f")
            handle.async_pwrite(pattern(1 << 20), tmp_path / "g")
        gc.collect()
        noise = [torch.full((1 << 20,), 7, dtype=torch.uint8) for _ in range(20)]
        assert handle.wait() == 20
    assert contents(tmp_path / "g") == pattern(1 << 20).numpy().tobytes()
    assert all(bool((x == 7).all()) for x in noise)


def test_a_handle_dropped_in_flight_finishes(tmp_path: Path, backend: str) -> None:
    """Fault (DeepSpeed): the destructor waits for a thread that waits for the GIL."""
    for i in range(20):
        handle = aio_handle(4096, 4, False, False, 2, backend=backend)
        handle.async_pwrite(pattern(500_000), tmp_path / f"{i}")
        del handle
    gc.collect()
    assert all(contents(tmp_path / f"{i}") == pattern(500_000).numpy().tobytes() for i in range(20))


def test_the_interpreter_ends_with_requests_in_flight(tmp_path: Path, backend: str) -> None:
    """Fault: a hang or a crash at exit; bytes that are lost."""
    program = (
        "import sys, torch; from deepspeed_ops.async_io import aio_handle\n"
        "h = aio_handle(4096, 4, backend=sys.argv[2])\n"
        "for i in range(8): h.async_pwrite(torch.full((1000003,), i, dtype=torch.uint8), sys.argv[1] + str(i))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "f"), backend],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, encoding="utf-8", errors="replace", timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(contents(tmp_path / f"f{i}") == bytes([i]) * 1_000_003 for i in range(8))


def test_several_failures_are_told_as_one(tmp_path: Path) -> None:
    """Fault: the second failure stays in the handle and meets the next caller."""
    (tmp_path / "f").write_bytes(bytes(4 << 20))
    with IoQueue(4096, 4) as queue, queue.open(tmp_path / "f") as file:
        tickets = [queue.submit_read(blank(1 << 20), file, i << 20) for i in range(4)]
        assert queue.wait_all() == 4 and all(t not in queue.pending for t in tickets)
        with pytest.raises(IoFailed):
            for i in range(4):
                queue.submit_read(blank(1 << 20), file, (i + 1) << 20)
        assert queue.wait_all() == 3 and queue.pending == ()


def test_a_backend_that_was_forced_and_fails_is_an_error(tmp_path: Path) -> None:
    """Fault: asked for one backend, measured another."""
    available("libaio")
    with Path("/proc/sys/fs/aio-max-nr").open(encoding="ascii") as limit:
        most = int(limit.read())
    held = [aio_handle(4096, 32768, backend="libaio") for _ in range(most // 32768 + 1)]
    (tmp_path / "f").write_bytes(bytes(8192))
    with IoQueue() as queue, queue.open(tmp_path / "f") as file:
        if not file.direct:
            pytest.skip("the file system of the temporary folder has no direct I/O")
    try:
        for handle in held:
            handle.sync_pread(blank(8192), tmp_path / "f")  # two blocks: one alone needs no queue
        assert any("in place of 32768" in line or "no engine" in line for h in held for line in h.backend_trace)
    except IoFailed as exc:
        assert exc.errno == errno.EAGAIN
    finally:
        for handle in held:
            handle.close()
    assert aio.backends()["libaio"][0]
