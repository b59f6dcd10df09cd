"""How fast a folder's disk reads and writes by block size, queue depth, threads and backend."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed_ops import fio
from deepspeed_ops.aio import IoQueue, backends
from deepspeed_ops.op_builder.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """One way to move bytes; sizes in bytes."""

    block_size: int
    queue_depth: int
    threads: int
    backend: str


@dataclass
class Measured:
    """What one setting gave.

    Attributes:
        setting: which.
        write: or read.
        gbps: of every repeat, GB/s.
        cpu_s_per_gb: processor seconds of this process for a GB, median.
        direct: whether the file went around the page cache; otherwise the figures are memory's.
        fio_gbps: of fio in the same turns; empty where it did not run.
    """

    setting: Setting
    write: bool
    gbps: list[float] = field(default_factory=list)
    cpu_s_per_gb: float = 0.0
    direct: bool = True
    fio_gbps: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """GB/s."""
        return statistics.median(self.gbps)

    @property
    def of_fio(self) -> float | None:
        """Our bandwidth over fio's."""
        return self.median / statistics.median(self.fio_gbps) if self.fio_gbps else None


@dataclass(frozen=True)
class Sweep:
    """What to measure: every combination of the four lists, reads, writes or both."""

    folder: Path
    size: int
    block_sizes: Sequence[int]
    queue_depths: Sequence[int]
    threads: Sequence[int]
    backends: Sequence[str]
    directions: Sequence[bool]
    repeats: int = 3
    with_fio: bool = False

    def settings(self) -> list[Setting]:
        """The combinations."""
        every = itertools.product(self.block_sizes, self.queue_depths, self.threads, self.backends)
        return [Setting(*one) for one in every]

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is written.

        Raises:
            UsageError: no such folder, too little room, an unknown backend or one that does not work here.
        """
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is no folder", "it names where the disk is measured", "")
        free = shutil.disk_usage(self.folder).free
        if free < self.size * 1.05:
            raise UsageError(f"{self.folder} has {free} bytes free", f"a file of {self.size} is written", "--size 256M")
        known = backends()
        for name in self.backends:
            if not known.get(name, (False, ""))[0]:
                works = ", ".join(n for n, (good, _) in known.items() if good)
                raise UsageError(f"backend {name} does not work here", known.get(name, (False, "no such"))[1], works)
        if any(self.size % (b * t) for b in self.block_sizes for t in self.threads):
            raise UsageError(f"size {self.size}", "expected a multiple of every block size x threads", "--size 1G")


def run(sweep: Sweep, step: Callable[[str], None] | None = None) -> list[Measured]:
    """Measure, repeats of all settings in turn so that a change of the disk's mood meets all alike.

    Args:
        sweep: what.
        step: told before each measurement what comes.

    Raises:
        UsageError: as :meth:`Sweep.check`.
        IoFailed, FioFailed: the disk or fio failed.
    """
    sweep.check()
    program = fio.find_fio() if sweep.with_fio else None
    found = [Measured(s, write) for write in sorted(sweep.directions, reverse=True) for s in sweep.settings()]
    cpu: dict[int, list[float]] = {id(m): [] for m in found}
    with scratch_file(sweep.folder, sweep.size) as path:
        for _ in range(sweep.repeats):
            for one in found:
                s = one.setting
                if step is not None:
                    way = "write" if one.write else "read"
                    step(f"{way} {s.backend} {s.block_size >> 10}K x {s.queue_depth} x {s.threads}")
                seconds, used, one.direct = measure(path, sweep.size, s, one.write)
                one.gbps.append(sweep.size / seconds / 1e9)
                cpu[id(one)].append(used / sweep.size * 1e9)
                if program is not None and one.direct and fio.has_equal(s.backend, s.queue_depth):
                    argv = fio.command(
                        program, path, one.write, sweep.size, s.block_size, s.queue_depth, s.threads, s.backend
                    )
                    peer = fio.run(argv)
                    one.fio_gbps.append(peer.nbytes / peer.seconds / 1e9)
    for one in found:
        one.cpu_s_per_gb = statistics.median(cpu[id(one)])
    return found


@contextmanager
def scratch_file(folder: Path, size: int) -> Iterator[Path]:
    """A file full of bytes that do not compress, removed afterwards."""
    path = folder / f".ds_io-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        setting = Setting(1 << 20, 32, 1, "auto")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
        measure(path, size, setting, True)
        yield path
    finally:
        path.unlink(missing_ok=True)


def measure(path: Path, size: int, setting: Setting, write: bool) -> tuple[float, float, bool]:
    """Seconds, processor seconds, and whether it was direct: the whole file once, in requests of 16 MiB or a block."""
    piece = max(16 << 20, setting.block_size)
    room = _memory(min(size, piece * 4))
    asked = (setting.block_size, setting.queue_depth, setting.threads)
    with IoQueue(*asked, backend=setting.backend) as queue, queue.open(path, write=write) as file:
        begun, used = time.perf_counter(), time.process_time()
        submit = queue.submit_write if write else queue.submit_read
        pending: list[int] = []
        for number, at in enumerate(range(0, size, piece)):
            if len(pending) == 4:
                queue.wait(pending.pop(0))
            begin = number % 4 * piece
            pending.append(submit(room[begin : begin + min(piece, size - at)], file, at))
        for ticket in pending:
            queue.wait(ticket)
        return time.perf_counter() - begun, time.process_time() - used, file.direct


_rooms: dict[int, Any] = {}


def _memory(nbytes: int) -> Any:
    """Page-aligned bytes, made once."""
    if nbytes not in _rooms:
        whole = torch.randint(0, 256, (nbytes + 4096,), dtype=torch.uint8)
        skip = -whole.data_ptr() % 4096
        _rooms[nbytes] = whole[skip : skip + nbytes]
    return _rooms[nbytes]


def best(found: Sequence[Measured]) -> Setting:
    """The setting with the highest geometric mean of its directions; within 2 % of that, the one that costs least."""
    by_setting: dict[Setting, list[Measured]] = {}
    for one in found:
        by_setting.setdefault(one.setting, []).append(one)
    rate = {s: statistics.geometric_mean([m.median for m in many]) for s, many in by_setting.items()}
    top = max(rate.values())
    close = [s for s in rate if rate[s] >= 0.98 * top]
    return min(close, key=lambda s: (statistics.mean(m.cpu_s_per_gb for m in by_setting[s]), s.queue_depth * s.threads))
