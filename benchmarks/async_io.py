"""``async_io`` beside fio: equal engine, block and depth, runs taken in turn on one file, direct I/O on both sides.

``python -m benchmarks async_io``; ``DS_BENCH_FILE`` names the file (default: ``async_io.bin`` in the temporary folder).

A record a case: bandwidth, or for the case "latency" the time of one 4 KiB transfer at depth 1; CPU seconds per GB of
both sides. ``fraction`` is ours over fio's (for the latency fio's time over ours), of medians; ``interval`` is where it
lies with 90 % confidence (bootstrap over the pairs). A case gets 15 to 61 pairs of runs, each run after a rest, and no
more once the interval lies on one side of the goal. fio's CPU time is its own (usr_cpu + sys_cpu of the job), ours that
of the process while the request runs. Memory is alike on both sides: the same number of bytes (depth times block),
which fio uses again and again and one request of ours sees as one long buffer, mapped over and over; huge pages on both
sides where they can be reserved (root), since how many pieces of physical memory a block has decides the bandwidth of a
virtual disk, and with small pages that is luck. At depth 1 this is to our disadvantage: a huge page can only be mapped
whole, so 2 MiB stand beside fio's one block, which stays in the cache. A locked tensor, all its memory its own, is a
case by itself. At depth 1 every backend of ours uses positioned calls (docs/why/0006); beside fio's ``psync``, which
does too, stands the backend ``threads``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from deepspeed_ops import fio
from deepspeed_ops.aio import IoQueue, backends
from deepspeed_ops.pin_memory import new_locked

ROUNDS = (15, 61)  # at least and at most
GOAL, GOAL_LATENCY = 0.97, 1 / 1.1
REST_S = 0.4  # before every run, so that none pays the disk's rate limit for the bytes of the one before
HUGE = 2 << 20
SIZE = 1 << 29
BLOCKS = {"128K": 128 << 10, "1M": 1 << 20}
DEPTHS = (1, 32, 128)
Cost = tuple[float, float]  # seconds, CPU seconds
Pair = tuple[Cost, Cost]  # ours, fio's
Run = Callable[[], Cost]


def fios(program: Path, path: Path, engine: str, write: bool, block: int, depth: int, size: int, huge: bool) -> Cost:
    """Seconds and CPU seconds of one run of fio."""
    memory = "shmhuge" if huge else "mmapshared"
    done = fio.run(fio.command(program, path, write, size, block, depth, 1, engine, memory=memory))
    return done.seconds * size / done.nbytes, done.cpu_s


def ours(path: Path, engine: str, write: bool, block: int, depth: int, memory: Any) -> Cost:
    """Seconds and CPU seconds of one request."""
    with IoQueue(block, depth, backend=engine) as queue, queue.open(path, write=write) as file:
        if not file.direct:
            raise SystemExit(f"{path}: no direct I/O on this file system; set DS_BENCH_FILE")
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        (queue.write if write else queue.read)(memory, file)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextlib.contextmanager
def set_for_a_while(setting: Path, value: str) -> Iterator[bool]:
    """A setting of the kernel, put back afterwards; False where it does not take the value."""
    try:
        before = setting.read_text(encoding="ascii").strip()
        chosen = re.search(r"\[(\w+)\]", before)  # "always [never]"
        before = chosen[1] if chosen else before
        setting.write_text(value, encoding="ascii")
    except OSError:
        yield False
        return
    try:
        now = setting.read_text(encoding="ascii").strip()
        yield now == value or f"[{value}]" in now
    finally:
        setting.write_text(before, encoding="ascii")


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[bool]:
    """Reserve huge pages for a while, and allow them in shared memory; False where the system gives none."""
    reserved, transparent = Path("/proc/sys/vm/nr_hugepages"), Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    wanted = count + int(reserved.read_text(encoding="ascii")) if reserved.is_file() else count
    with set_for_a_while(transparent, "advise") as shared, set_for_a_while(reserved, str(wanted)) as given:
        yield shared and given


class Repeated:
    """A buffer of ``size`` bytes, all of it the same ``span`` bytes of shared memory.

    Attributes:
        tensor: the buffer.
    """

    def __init__(self, size: int, span: int, huge: bool) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        span = -(-span // HUGE) * HUGE if huge else span  # huge pages are mapped whole
        size = -(-size // span) * span
        fd, self._size = os.memfd_create("async_io", os.MFD_HUGETLB if huge else 0), size + HUGE
        os.truncate(fd, span)
        self._mapping = self._libc.mmap(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        start = -(-self._mapping // HUGE) * HUGE
        access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10  # MAP_FIXED
        for at in range(start, start + size, span):
            if self._libc.mmap(at, span, access, fixed, fd, 0) != at:
                raise OSError(ctypes.get_errno(), "mmap")
        os.close(fd)
        self.tensor = torch.frombuffer((ctypes.c_byte * size).from_address(start), dtype=torch.uint8)
        self.tensor[:span].random_(0, 255)

    def close(self) -> None:
        """Unmap; the tensor must not be used any more."""
        self._libc.munmap(ctypes.c_void_p(self._mapping), ctypes.c_size_t(self._size))


def verify(path: Path, engine: str, sent: torch.Tensor) -> None:
    """The file holds what was written, by this engine."""
    got = torch.zeros_like(sent)
    with IoQueue(1 << 20, 32, backend=engine) as queue:
        queue.read(got, path)
    if not torch.equal(got, sent):
        raise SystemExit(f"{engine} reads other bytes than were written")


def ratio(pairs: Sequence[Pair]) -> float:
    """fio's median time over ours."""
    return statistics.median(b[0] for _, b in pairs) / statistics.median(a[0] for a, _ in pairs)


def interval(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Where :func:`ratio` lies with 90 % confidence: percentiles of resampled pairs."""
    drawn = random.Random(0)
    found = sorted(ratio(drawn.choices(pairs, k=len(pairs))) for _ in range(400))
    return found[20], found[-21]


def decided(pairs: Sequence[Pair], goal: float) -> bool:
    """Whether the interval lies on one side of the goal."""
    low, high = interval(pairs)
    return low >= goal or high < goal


def measure_pairs(mine: Run, theirs: Run, goal: float, rounds: tuple[int, int]) -> list[Pair]:
    """Both sides in turn, each after a rest; who begins changes with every round."""
    pairs: list[Pair] = []
    while len(pairs) < rounds[0] or (len(pairs) < rounds[1] and not decided(pairs, goal)):
        cost = {}
        for side in (mine, theirs) if len(pairs) % 2 == 0 else (theirs, mine):
            time.sleep(REST_S)
            cost[side] = side()
        pairs.append((cost[mine], cost[theirs]))
    return pairs


def case(name: str, size: int, pairs: Sequence[Pair], **facts: Any) -> dict[str, Any]:
    """One record."""
    mine, theirs = (statistics.median(p[side][0] for p in pairs) for side in (0, 1))
    rounds = [[round(a[0] * 1e3, 2), round(b[0] * 1e3, 2)] for a, b in pairs]
    return {
        "op": "async_io",
        "case": name,
        "dtype": "bytes",
        **facts,
        "ours_us": round(mine * 1e6, 1),
        "bytes": size,
        "gbps": round(size / mine / 1e9, 3),
        "ceiling_gbps": round(size / theirs / 1e9, 3),
        "fraction": round(theirs / mine, 3),
        "interval": [round(x, 3) for x in interval(pairs)],
        "cpu_s_per_gb": round(statistics.median(a[1] for a, _ in pairs) / size * 1e9, 4),
        "fio_cpu_s_per_gb": round(statistics.median(b[1] for _, b in pairs) / size * 1e9, 4),
        "rounds_ms": rounds,
        "peers": {"fio": round(theirs * 1e6, 1)},
    }


def measure(program: Path, path: Path, quick: bool, only: str, huge: bool) -> Iterator[dict[str, Any]]:
    """Every case in whose name the expression ``only`` is found."""
    size = SIZE // 2 if quick else SIZE
    locked = new_locked(size, torch.uint8)
    locked.random_(0, 255)
    with IoQueue() as queue:
        queue.write(locked, path, sync=True)
    engines = [e for e in ("libaio", "io_uring", "threads") if backends()[e][0]]
    for engine in engines:
        verify(path, engine, locked)
    for write, engine in itertools.product((False, True), engines):
        way = f"{'write' if write else 'read'} {engine}"
        plans = [(f"{way} {b} depth {d}", n, d, size, None) for b, n in BLOCKS.items() for d in DEPTHS]
        plans.append((f"{way} 1M depth 32, locked tensor", 1 << 20, 32, size, locked))
        plans.append((f"{way} 4K depth 1, latency", 4096, 1, 32 << 20, None))
        for name, block, depth, length, memory in plans:
            if not re.search(only, name) or not fio.has_equal(engine, depth):
                continue
            repeated = Repeated(length, block * depth, huge) if memory is None else None
            view = repeated.tensor[:length] if repeated else memory[:length]
            pairs = measure_pairs(
                lambda args=(path, engine, write, block, depth, view): ours(*args),
                lambda args=(program, path, engine, write, block, depth, length, huge): fios(*args),
                GOAL_LATENCY if "latency" in name else GOAL,
                (3, 3) if quick else ROUNDS,
            )
            facts = {"engine": engine, "write": write, "block": block, "depth": depth, "huge_pages": huge}
            made = case(name, length, pairs, **facts)
            if "latency" in name:
                made["latency_us"] = round(made["ours_us"] / (length / block), 2)
                made["fio_latency_us"] = round(made["peers"]["fio"] / (length / block), 2)
            print(
                f"{name}: {made['gbps']} GB/s, {made['fraction']} of fio {made['interval']}, {len(pairs)} pairs",
                flush=True,
            )
            yield made
            del view
            if repeated:
                repeated.close()


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """All cases (``DS_BENCH_ONLY``: those in whose name it is found, as a regular expression); nothing without fio."""
    program = fio.find_fio()
    if program is None:
        print("async_io: fio is not installed, not run")
        return []
    path = Path(os.environ.get("DS_BENCH_FILE") or Path(tempfile.gettempdir()) / "async_io.bin")
    version = subprocess.run([program, "--version"], capture_output=True, encoding="utf-8", check=True).stdout.strip()
    where = {**record.where(torch.device("cpu")), "fio": version}
    records: list[dict[str, Any]] = []
    try:
        with huge_pages(2 * 128 + 8) as huge:  # what fio and we need at depth 128 and 1 MiB
            for made in measure(program, path, quick, os.environ.get("DS_BENCH_ONLY", ""), huge):
                records.append({**made, **where, "load": round(os.getloadavg()[0], 2)})
                record.save("async_io", records[-1:], folder)  # at once: it takes half an hour in all
    finally:
        path.unlink(missing_ok=True)
    rows = [
        (r["case"], f"{r['gbps']:.2f}", f"{r['ceiling_gbps']:.2f}", f"{r['fraction']:.2f}",
         "{:.2f} to {:.2f}".format(*r["interval"]),
         f"{r['cpu_s_per_gb']:.3f}", f"{r['fio_cpu_s_per_gb']:.3f}") for r in records
    ]  # fmt: skip
    head = ("case", "ours, GB/s", "fio, GB/s", "ratio", "90 %", "CPU s/GB", "fio's")
    record.table("async_io and fio, in turn", rows, head)
    return records
