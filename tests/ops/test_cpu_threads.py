"""Threads of cpu_adam: how many take part, whom they obey, and what fork and concurrent callers do to them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from compare import assert_bits
from deepspeed_ops.op_builder import loader
from raw import F32, Tensors, copies, random_tensors, step_many
from reference import Hyper

from deepspeed_ops.adam import DeepSpeedCPUAdam

N = 400_003
needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no sched_setaffinity on this system")


def usable() -> int:
    return int(loader.host_module("cpu_adam").usable_cpus())


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tensors(rng: torch.Generator) -> Tensors:
    return random_tensors(N, (F32, F32, F32), rng)


def test_usable_cpus_is_no_more_than_the_machine_has() -> None:
    """Fault: a container with two CPUs on a host of 128 starts 128 threads."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert 1 <= usable() <= allowed


@pytest.mark.parametrize("asked", [1, 2, 3, 1000])
def test_threads_that_take_part(asked: int, tensors: Tensors) -> None:
    """Fault: the caller's limit ignored, or more threads than CPUs."""
    took_part = step_many([tensors], [1], Hyper(), threads=asked)
    assert 1 <= took_part <= min(asked, usable())
    if asked > 1 and usable() > 1:
        assert took_part > 1, "a tensor of 400,003 elements is worth a second thread"


def test_little_work_wakes_nobody(rng: torch.Generator) -> None:
    """Fault: a hand-over to another thread that costs more than the work."""
    assert step_many([random_tensors(100, (F32, F32, F32), rng)], [1], Hyper(), threads=64) == 1


def test_nothing_to_do_takes_no_thread(rng: torch.Generator) -> None:
    """Fault: an empty job with threads waiting for it."""
    assert step_many([random_tensors(0, (F32, F32, F32), rng)] * 3, [1, 1, 1], Hyper(), threads=64) == 0


@needs_affinity
def test_affinity_is_obeyed_and_followed(tensors: Tensors) -> None:
    """Fault: workers outside the mask of a process that was pinned (before or after its first step)."""
    before = os.sched_getaffinity(0)
    step_many([copies(tensors)], [1], Hyper(), threads=64)
    expected = copies(tensors)
    step_many([expected], [1], Hyper(), threads=64)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable() == 1
        pinned = copies(tensors)
        assert step_many([pinned], [1], Hyper(), threads=64) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert_bits("p", pinned[0], expected[0])


def test_optimizer_obeys_torch_num_threads(torch_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: torch.set_num_threads(1), set by every data loader worker, does not reach the op."""
    module, seen = loader.host_module("cpu_adam"), []

    class Spy:
        collect_addresses = module.collect_addresses

        @staticmethod
        def step_table(args: int, level: str) -> int:
            seen.append(int(module.step_table(args, level)))
            return seen[-1]

    monkeypatch.setattr(loader, "host_module", lambda _op: Spy)
    w = torch.nn.Parameter(torch.zeros(N))
    w.grad = torch.ones(N)
    optimizer = DeepSpeedCPUAdam([w])
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        optimizer.step()
    assert seen == [1, min(2, int(module.usable_cpus())), 1]


def in_fork(target: Callable[[Connection], None]) -> bytes:
    """What the child sends; fails where it dies or hangs."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs,))
    child.start()
    theirs.close()
    try:
        assert ours.poll(60), "the forked child hangs"
        return bytes(ours.recv_bytes())
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
        ours.close()


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 64])
def test_fork_after_use(threads: int, tensors: Tensors) -> None:
    """Fault: the child waits for workers that only the parent has."""
    expected = copies(tensors)
    step_many([expected], [3], Hyper(), threads=64)

    # Made before the fork: torch's own parallel operations hang in such a child, so it may call none.
    mine = [copies(tensors) for _ in range(2)]

    def step(pipe: Connection) -> None:
        for t in mine:
            step_many([t], [3], Hyper(), threads=threads)
        pipe.send_bytes(mine[1][0].numpy().tobytes())

    for _ in range(3):
        assert in_fork(step) == expected[0].numpy().tobytes()
    after = copies(tensors)
    step_many([after], [3], Hyper(), threads=64)
    assert_bits("p in the parent, after the forks", after[0], expected[0])


FIRST_USE = """
import multiprocessing, sys
import torch

def step(pipe):
    torch.set_num_threads(1)  # as data loaders do: torch's own operations hang in such a child otherwise
    from deepspeed_ops.adam import DeepSpeedCPUAdam
    w = torch.nn.Parameter(torch.ones(400_003))
    w.grad = torch.ones(400_003)
    DeepSpeedCPUAdam([w], lr=0.5).step()
    pipe.send(float(w.sum()))

a = torch.ones(2000, 2000)
(a @ a).exp_()  # torch's own workers exist before the fork
ours, theirs = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=step, args=(theirs,))
child.start()
hangs = not ours.poll(60)
if hangs:
    child.kill()
    sys.exit("the child hangs")
print(ours.recv())
child.join()
"""


@needs_fork
def test_first_use_in_a_fork_of_a_process_that_used_torch() -> None:
    """Fault: the OpenMP runtime is found in the child for the first time; its team has not survived the fork."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_USE],
        capture_output=True,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - 200_001.5) < 50


def test_concurrent_callers(rng: torch.Generator) -> None:
    """Fault: two Python threads that step at once share one job, or wait for each other forever."""
    before = [random_tensors(150_001, (F32, F32, F32), rng) for _ in range(4)]
    alone = [copies(t) for t in before]
    for t in alone:
        for step in range(1, 6):
            step_many([t], [step], Hyper(), threads=1)
    together = [copies(t) for t in before]

    def work(t: Tensors) -> None:
        for step in range(1, 6):
            step_many([t], [step], Hyper(), threads=64)

    workers = [threading.Thread(target=work, args=(t,), daemon=True) for t in together]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "callers wait for each other"
    for a, b in zip(alone, together, strict=True):
        for name, x, y in zip("pgmv", a, b, strict=True):
            assert_bits(name, y, x)
