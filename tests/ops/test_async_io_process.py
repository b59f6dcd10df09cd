"""``async_io`` in a process that forks, has other threads, and lives long."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed_ops.op_builder.errors import UsageError
from io_files import BACKENDS, available, blank, contents, pattern

from deepspeed_ops import aio
from deepspeed_ops.aio import IoQueue
from deepspeed_ops.async_io import aio_handle


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that works here."""
    return available(str(request.param))


def in_child(work: Callable[[], bool], limit_s: float = 60.0) -> int:
    """Exit status of a child that does some work: 0 if it returned True in time."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def test_fork_with_requests_in_flight(backend: str, tmp_path: Path) -> None:
    """Fault: the child hangs on threads that are the parent's, or the parent's bytes land in the child's pages."""
    sent = os.urandom(50_001)
    size, handle = 1_000_001, aio_handle(4096, 8, False, True, 2, backend=backend)
    (tmp_path / "in").write_bytes(pattern(size).numpy().tobytes())
    for turn in range(4):
        got = blank(size)
        handle.async_pread(got, tmp_path / "in")
        handle.async_pwrite(pattern(size), tmp_path / f"out{turn}")

        def child(turn: int = turn) -> bool:
            mine = bytearray(len(sent))  # torch's own threads do not survive a fork
            handle.sync_pwrite(sent, tmp_path / f"child{turn}")
            handle.async_pread(mine, tmp_path / f"child{turn}")
            done = handle.wait()  # the parent's are not ours to wait for
            handle.close()
            return done == 1 and mine == sent

        assert in_child(child) == 0
        got[0] = got[0].clone()  # a store of ours makes a copy of a page that is shared with a child
        assert handle.wait() == 2
        assert torch.equal(got, pattern(size)) and contents(tmp_path / f"out{turn}") == pattern(size).numpy().tobytes()


def test_a_childs_end_leaves_the_parents_handle_alone(backend: str, tmp_path: Path) -> None:
    """Fault: a child's exit takes the parent's ring or context down, or waits for its threads."""
    handle = aio_handle(backend=backend)
    handle.async_pwrite(pattern(1 << 20), tmp_path / "f")
    handle.wait()
    assert in_child(lambda: True) == 0
    done = subprocess.run([sys.executable, "-c", "pass"], timeout=60, check=False)
    assert done.returncode == 0
    got = blank(1 << 20)
    handle.async_pread(got, tmp_path / "f")
    assert handle.wait() == 1 and torch.equal(got, pattern(1 << 20))


def test_a_ticket_of_the_parent(tmp_path: Path) -> None:
    """Fault: the child waits for ever for a request that the parent made."""
    with IoQueue() as queue:
        ticket = queue.submit_write(pattern(100), tmp_path / "f")

        def child() -> bool:
            try:
                queue.wait(ticket)
            except UsageError:
                return True
            return False

        assert in_child(child) == 0
        assert queue.wait(ticket) == 100


@pytest.mark.parametrize("way", ["sync_pread", "pread", "read", "wait", "close"])
def test_the_gil_is_free_while_we_wait(way: str, tmp_path: Path) -> None:
    """Fault: a thread that computes stands still while another reads."""
    (tmp_path / "f").write_bytes(bytes(8 << 20))
    handle, tensor = aio_handle(4096, 1, backend="threads" if way == "read" else None), blank(8 << 20)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        path = str(tmp_path / "f")
        if way in ("wait", "close"):
            handle.async_pread(tensor, path)
        before, start = ticks[0], time.perf_counter()
        arguments = {"sync_pread": (tensor, path), "pread": (tensor, path, False, False), "read": (tensor, path, False)}
        getattr(handle, way)(*arguments.get(way, ()))
        spent, ticked = time.perf_counter() - start, ticks[0] - before
    finally:
        stop.set()
        thread.join()
    assert spent > 0.002 and ticked > 20, f"{ticked} ticks in {spent:.4f} s"


def test_one_handle_in_many_threads(backend: str, tmp_path: Path) -> None:
    """Fault: two calls of one handle get each other's bytes, or wait for each other for ever."""
    handle, problems = aio_handle(4096, 8, False, True, 2, backend=backend), []
    parts = [pattern(200_000 + i) for i in range(8)]

    def work(i: int) -> None:
        try:
            for turn in range(5):
                handle.sync_pwrite(parts[i], tmp_path / f"{i}", turn)
                got = blank(len(parts[i]), turn)
                handle.sync_pread(got, tmp_path / f"{i}", turn)
                if not torch.equal(got, parts[i]):
                    problems.append(i)
        except Exception as exc:
            problems.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not problems


def resident_kib() -> int:
    """What the kernel says of this process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


def test_ten_thousand_operations_leave_nothing(tmp_path: Path, backend: str) -> None:
    """Fault: a descriptor, a mapping or some bytes an operation, which no short test notices."""

    def fds() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def maps() -> int:
        return len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())

    tensor, path = pattern(700), tmp_path / "f"
    with IoQueue(4096, 4, backend=backend) as queue:

        def some(n: int) -> None:
            for _ in range(n):
                queue.write(tensor, path)
                queue.read(tensor, path)
                for ticket in [queue.submit_read(tensor, path) for _ in range(2)]:
                    queue.wait(ticket)
                with contextlib.suppress(OSError):
                    queue.read(tensor, tmp_path / "none")

        some(200)
        before = fds(), maps(), resident_kib()
        some(2000)
        assert fds() == before[0] and maps() <= before[1] + 8
        assert resident_kib() - before[2] < 2048
    before = fds(), maps(), resident_kib()
    for i in range(30):
        with aio_handle(4096, 4, False, True, 2, backend=backend) as handle:
            handle.async_pwrite(tensor, path, i)
            handle.wait()
    assert fds() <= before[0] and resident_kib() - before[2] < 4096
    assert aio.backends()[backend][0]
