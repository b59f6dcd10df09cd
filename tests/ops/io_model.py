"""Random interleavings of reads and writes against a model file, on an honest storage and on one that misbehaves.

``python io_model.py BACKEND FOLDER EXAMPLES`` runs them with ``native/io_faults.cpp`` preloaded and prints, as JSON,
how many requests were made, how many failed, and how often each kind of fault happened.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed_ops.op_builder.errors import IoFailed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from io_files import blank

from deepspeed_ops.aio import IoQueue

KINDS = ("short", "interrupted", "again", "broken", "full")
SIZE = 70_000


@dataclass(frozen=True)
class Asked:
    """One request: bytes [offset, offset + size) of the file, at an address ``lead`` bytes past an aligned one.

    Attributes:
        call: done by the calling thread, beside what is in flight.
        wait: nothing more is asked for before it is done.
    """

    write: bool
    call: bool
    wait: bool
    offset: int
    size: int
    lead: int
    value: int

    def overlaps(self, other: Asked) -> bool:
        """Whether two requests touch the same bytes and one changes them."""
        apart = self.offset + self.size <= other.offset or other.offset + other.size <= self.offset
        return not apart and (self.write or other.write)

    def unsure(self, broken: list[Asked]) -> bool:
        """Whether a write that failed left bytes of it old or new."""
        return any(other.overlaps(self) for other in broken)


def edges() -> st.SearchStrategy[int]:
    """Positions around the boundaries of sectors, pages and blocks, and others."""
    near = st.builds(lambda unit, k, d: max(0, unit * k + d), st.sampled_from([512, 4096, 65536]), st.integers(0, 17),
                     st.integers(-2, 2))  # fmt: skip
    return st.one_of(near, st.integers(0, SIZE)).map(lambda x: min(x, SIZE))


requests = st.lists(
    st.builds(Asked, st.booleans(), st.booleans(), st.booleans(), edges(), edges(), st.sampled_from([0, 0, 1, 64, 512]),
              st.integers(0, 255)),
    min_size=6, max_size=24,
)  # fmt: skip
queues = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1000, 4096, 16384, 1 << 20]),
        "queue_depth": st.sampled_from([1, 2, 16]),
        "threads": st.sampled_from([1, 3]),
        "single_submit": st.booleans(),
    }
)

Flight = tuple[Callable[[], int], Asked, torch.Tensor]  # what gives its bytes or raises


class Model:
    """The file as it must be. ``None`` where a failed write leaves old or new bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = bytearray(i * 7 % 256 for i in range(SIZE))
        path.write_bytes(self.bytes)
        self.failed = self.made = 0

    def play(self, queue: IoQueue, plan: list[Asked], may_fail: bool) -> list[Asked]:
        """Run a plan; checks every read. Returns the writes that failed."""
        flight: list[Flight] = []
        broken: list[Asked] = []
        for asked in plan:
            if any(asked.overlaps(other) for _, other, _ in flight):
                self.settle(flight, broken, may_fail)
            tensor = blank(asked.size, asked.lead)
            if asked.write:
                tensor.copy_((torch.arange(asked.size) * 13 + asked.value) % 251)
            if asked.call:
                start = functools.partial(queue.write if asked.write else queue.read, tensor, self.path, asked.offset)
            else:
                submit = queue.submit_write if asked.write else queue.submit_read
                start = functools.partial(submit, tensor, self.path, asked.offset)
            self.made += 1
            if asked.offset + asked.size > len(self.bytes) and not asked.write:
                try:
                    start()
                    raise AssertionError(f"{asked} reads past the end of {len(self.bytes)} bytes")
                except IoFailed:
                    continue
            if asked.write and asked.size:
                self.bytes.extend(bytes(max(0, asked.offset + asked.size - len(self.bytes))))
            if asked.call:
                self.settle([(start, asked, tensor)], broken, may_fail)
                continue
            try:
                flight.append((functools.partial(queue.wait, start()), asked, tensor))
            except IoFailed:
                assert broken and not asked.write, "only after a write that failed can the file be shorter"
                continue
            if asked.wait or asked.offset + asked.size > SIZE:  # a file that grows under a read in flight has no model
                self.settle(flight, broken, may_fail)
        self.settle(flight, broken, may_fail)
        return broken

    def settle(self, flight: list[Flight], broken: list[Asked], may_fail: bool) -> None:
        """Wait for what is in flight, compare reads, take writes over."""
        for done, asked, tensor in flight:
            span = slice(asked.offset, asked.offset + asked.size)
            try:
                assert done() == asked.size
            except IoFailed:
                assert may_fail, "nothing was to fail"
                self.failed += 1
                if asked.write:
                    broken.append(asked)
                continue
            if asked.write:
                self.bytes[span] = tensor.numpy().tobytes()
                broken[:] = [b for b in broken if b != asked]
            elif not asked.unsure(broken):
                assert tensor.numpy().tobytes() == bytes(self.bytes[span]), asked
        flight.clear()

    def check(self, unsure: list[Asked]) -> None:
        """Compare the file with the model, except where a write failed: there a byte is the old or the new one."""
        real = bytearray(self.path.read_bytes())
        for asked in unsure:
            span = slice(asked.offset, min(asked.offset + asked.size, len(real)))
            real.extend(bytes(max(0, asked.offset + asked.size - len(real))))
            self.bytes[span] = real[span]
        longest = max(len(real), len(self.bytes))
        assert real.ljust(longest, b"\0") == self.bytes.ljust(longest, b"\0")


def main(backend: str, folder: str, examples: int) -> dict[str, Any]:
    """The plans with faults."""
    faults = ctypes.CDLL(None)
    totals = {"made": 0, "failed": 0}
    seeds = itertools.count(1)  # hypothesis would give 0 again and again, and with it the same faults

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(plan=requests, options=queues, mood=st.sampled_from(["rough", "rough", "broken"]))
    def run(plan: list[Asked], options: dict[str, Any], mood: str) -> None:
        model = Model(Path(folder) / "f")
        try:
            with IoQueue(**options, backend=backend) as queue:
                broken = 60 if mood == "broken" else 0
                faults.io_faults_set(ctypes.c_uint64(next(seeds)), 200, 100, 100, broken, broken)
                unsure = model.play(queue, plan, mood == "broken")
                faults.io_faults_set(ctypes.c_uint64(0), 0, 0, 0, 0, 0)
        finally:
            faults.io_faults_set(ctypes.c_uint64(0), 0, 0, 0, 0, 0)
        model.check(unsure)
        totals["made"] += model.made
        totals["failed"] += model.failed

    run()
    return {**totals, **{kind: int(faults.io_faults_count(i)) for i, kind in enumerate(KINDS)}}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
