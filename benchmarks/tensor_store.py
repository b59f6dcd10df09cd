"""TensorStore beside raw writes and reads of the same bytes by the same queue: 1.3 GB of an optimizer's state, in turn.

The ceiling is what IoQueue moves from and to memory that lies ready, into a file that was preallocated and is flushed,
as TensorStore's is; what TensorStore adds is copying, digests, the index and the rename.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import interleaved_us, quartiles, save, table, where
from deepspeed.io import TensorStore

CHUNK = 16 << 20


def optimizer_state(nbytes: int) -> dict[str, Any]:
    """The state of an Adam over layers of a transformer's shapes, with two moments, about ``nbytes`` in all."""
    shapes = [(1024, 4096), (4096, 1024), (1024, 1024), (1024,), (4096,)]
    one = sum(8 * torch.Size(s).numel() for s in shapes)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for _ in range(max(1, nbytes // one)):
        for shape in shapes:
            moments = {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
            state[len(state)] = {"step": torch.tensor(3.0), **moments}
    return {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(state)}]}


def raw(store: TensorStore, path: Path, memory: torch.Tensor, write: bool) -> None:
    """The bytes of ``memory`` into a new preallocated file and flushed, or out of it again."""
    queue, n = store._queue, memory.numel()
    if write:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, n)
        os.close(fd)
    with queue.open(path, write=write) as file:
        submit = queue.submit_write if write else queue.submit_read
        tickets = [submit(memory[at : at + CHUNK], file, at) for at in range(0, n, CHUNK)]
        for ticket in tickets:
            queue.wait(ticket)
        if write:
            queue.write(memory[:4096], file, 0, sync=True)


def run(out: Path | None = None, quick: bool = False) -> None:
    """Measure and record."""
    nbytes = int(0.2e9) if quick else int(1.3e9)
    with tempfile.TemporaryDirectory(
        dir=os.environ.get("DS_BENCH_IO_DIR") or Path.cwd(), prefix=".bench-io-"
    ) as folder:
        store = TensorStore(folder)
        state = optimizer_state(nbytes)
        saved = store.save("state", state)
        memory = torch.randint(0, 255, (saved.nbytes // 4096 * 4096,), dtype=torch.uint8)
        target = store.load("state")
        works: dict[str, Callable[[], Any]] = {
            "save": lambda: store.save("state", state),
            "raw write": lambda: raw(store, Path(folder, "raw"), memory, True),
            "load_into": lambda: store.load_into("state", target),
            "raw read": lambda: raw(store, Path(folder, "raw"), memory, False),
            "load": lambda: store.load("state"),
        }
        begun = time.process_time()
        times = interleaved_us(works, repeats=3 if quick else 7, warm_up=1)
        records, rows = [], []
        for name, ceiling in (("save", "raw write"), ("load_into", "raw read"), ("load", "raw read")):
            low, median, high = quartiles(times[name])
            rate, best = saved.nbytes / median / 1e3, memory.numel() / quartiles(times[ceiling])[1] / 1e3
            records.append(
                {
                    **{"op": "tensor_store", "case": f"{name}, {saved.nbytes / 1e9:.2f} GB, {saved.tensors} tensors"},
                    **{"dtype": "float32", **where(torch.device("cpu")), "backend": store._queue.backend},
                    **{"ours_us": round(median), "quartiles_us": [round(low), round(high)], "bytes": saved.nbytes},
                    **{"gbps": round(rate, 3), "ceiling_gbps": round(best, 3), "fraction": round(rate / best, 4)},
                    **{"ceiling": ceiling, "peers": {}},
                }
            )
            rows.append((name, f"{rate:.2f}", f"{best:.2f}", f"{100 * rate / best:.0f} %"))
        save("tensor_store", records, out)
        table("TensorStore", rows, ("", "GB/s", "raw GB/s", "of raw"))
        print(f"CPU seconds in all: {time.process_time() - begun:.1f}")
        store.close()
