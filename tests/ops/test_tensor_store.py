"""TensorStore: what comes back is what went in, and whatever dies on the way leaves the old version or the new one."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_ops.op_builder.errors import CorruptFile, IoFailed, TensorError, UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.io import TensorStore
from deepspeed_ops import tensor_file as tf

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


def same(a: Any, b: Any) -> None:
    """Equal structure, types, bits and strides."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert bytes(tf.memory(a).numpy()) == bytes(tf.memory(b).numpy())
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b or (a != a and b != b)


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    """A store in a folder of its own."""
    return TensorStore(tmp_path / "store")


def test_an_optimizers_state_comes_back(store: TensorStore) -> None:
    """Fault: an int key that returns as a string, a tuple as a list, a step counter as a float."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model(torch.randn(5, 300)).sum().backward()
    optimizer.step()
    store.save("adamw", optimizer.state_dict())
    same(store.load("adamw"), optimizer.state_dict())
    again = torch.optim.AdamW(model.parameters(), lr=1.0)
    again.load_state_dict(store.load("adamw"))
    assert again.param_groups[0]["lr"] == 3e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 63, 16_383, 16_384, 100_003, 5_000_000])
def test_every_dtype_and_size(dtype: torch.dtype, n: int, store: TensorStore) -> None:
    """Fault: a tail, an empty tensor or a dtype that numpy lacks; the border between small and large tensors."""
    raw = torch.arange(n * dtype.itemsize, dtype=torch.int64).mul_(31).remainder_(251).to(torch.uint8)
    tensor = (raw % 2).view(torch.bool)[:n] if dtype is torch.bool else raw.view(dtype)
    state = {"t": tensor, "again": [tensor, tensor.clone()]}
    store.save("x", state)
    back = store.load("x")
    same(back, state)
    if n:
        assert back["t"].data_ptr() == back["again"][0].data_ptr() != back["again"][1].data_ptr()


def test_layouts(store: TensorStore) -> None:
    """Fault: a transposed moment that comes back in another order; an expanded one that comes back sharing memory."""
    base = torch.randn(4, 6, 8, 10)
    state = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base[0, 0].t(),
        "strided": base[:, :, ::2],
        "expanded": torch.randn(1, 5).expand(7, 5),
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "one": torch.randn(5, 1, 3)[:, :, :1],
    }
    store.save("x", state)
    back = store.load("x")
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor.detach()), name
        assert back[name].is_contiguous() or back[name].stride() == tensor.stride(), name
    assert back["channels_last"].stride() == state["channels_last"].stride()
    assert not back["parameter"].requires_grad


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
tensors = st.tuples(st.sampled_from(DTYPES[:8]), st.lists(st.integers(0, 5), max_size=3)).map(
    lambda p: torch.zeros(p[1], dtype=p[0])
)
trees = st.recursive(
    leaves | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(trees)
@settings(max_examples=200, deadline=None)
def test_any_tree_survives_its_json(tree: Any) -> None:
    """Fault: a value that JSON changes: an int key, a tuple, inf, a surrogate."""
    flat, found = tf.flatten(tree)
    same(tf.unflatten(json.loads(json.dumps(flat, allow_nan=False)), found), tree)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        ({(1, 2): 3}, "key"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
    ],
    ids=["object", "set", "key", "sparse", "meta"],
)
def test_what_cannot_be_kept_is_refused_by_its_place(value: Any, word: str, store: TensorStore) -> None:
    """Fault: a pickle in disguise; a refusal that does not say which entry."""
    with pytest.raises(TensorError, match=word) as found:
        store.save("x", {"state": [1, {"here": value}]})
    assert "['state'][1]" in str(found.value)
    assert store.names() == () and not list(store.folder.glob(".*.tmp"))


def test_load_into_uses_the_memory_that_is_there(store: TensorStore) -> None:
    """Fault: a second copy of an optimizer's state, which is the memory that swapping should save."""
    state = {"m": torch.randn(300, 400), "v": torch.randn(100_000), "lr": 0.1}
    store.save("x", state)
    target = {"m": torch.zeros(400, 300).t(), "v": torch.zeros(100_000), "lr": 0.5}
    places, version = (target["m"].data_ptr(), target["v"].data_ptr()), target["v"]._version
    back = store.load_into("x", target)
    assert (target["m"].data_ptr(), target["v"].data_ptr()) == places and back["lr"] == 0.1
    assert torch.equal(target["m"], state["m"]) and torch.equal(target["v"], state["v"])
    assert target["v"]._version > version, "autograd would not notice that the tensor changed"
    for wrong in (
        {"m": target["m"]},
        {**target, "v": torch.zeros(5)},
        {**target, "m": torch.zeros(1).expand(300, 400)},
    ):
        with pytest.raises(TensorError):
            store.load_into("x", wrong)


def test_names(store: TensorStore) -> None:
    """Fault: a name that leaves the folder."""
    for bad in ("", "../x", "a/b", ".hidden", "x" * 300, "a b", None):
        with pytest.raises(UsageError):
            store.save(bad, {})  # type: ignore[arg-type]
    store.save("b.2", {"x": 1})
    store.save("a", {})
    assert store.names() == ("a", "b.2") and "a" in store and "c" not in store
    store.delete("a")
    assert store.names() == ("b.2",)
    for call in (store.load, store.info, store.verify, store.delete):
        with pytest.raises(IoFailed) as found:
            call("a")
        assert found.value.errno == errno.ENOENT


@pytest.mark.parametrize("place", ["header", "index", "small", "large", "cut", "longer", "empty", "foreign"])
def test_damage_is_seen(place: str, store: TensorStore) -> None:
    """Fault: one flipped bit that trains on."""
    store.save("x", {"small": torch.arange(10), "large": torch.arange(100_000)})
    path = store.folder / "x.tensors"
    content = bytearray(path.read_bytes())
    offset = {"header": 20, "index": len(content) - 5, "small": 4096 + 3, "large": 8192 + 1000, "foreign": 0}.get(place)
    if offset is not None:
        content[offset] ^= 1
    path.write_bytes({"cut": content[:-1], "longer": content + b"x", "empty": b""}.get(place, bytes(content)))
    for call in (store.load, store.verify) if place in ("small", "large") else (store.load, store.info, store.verify):
        with pytest.raises(CorruptFile, match=r"x\.tensors"):
            call("x")


def test_a_full_disk_leaves_the_old_version(tmp_path: Path) -> None:
    """Fault: a half-written file under the final name, or one beside it that keeps the disk full."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, stdin=subprocess.DEVNULL, timeout=60).returncode:
        pytest.skip("mounting needs root")
    try:
        with TensorStore(folder) as store:
            store.save("x", {"t": torch.ones(200_000)})
            with pytest.raises(IoFailed) as found:
                store.save("x", {"t": torch.zeros(800_000)})
            assert found.value.errno == errno.ENOSPC
            assert float(store.load("x")["t"].sum()) == 200_000
            assert [p.name for p in folder.iterdir() if p.is_file()] == ["x.tensors"]
    finally:
        subprocess.run(["umount", str(folder)], check=True, stdin=subprocess.DEVNULL, timeout=60)


def write_for_ever(folder: Path, version: int) -> None:
    """One version after the other, until killed."""
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    store = TensorStore(folder)
    while True:
        big, small = torch.full((1_000_000,), version), torch.full((9,), version)
        store.save("x", {"version": version, "big": big, "small": [small, small.clone()]})
        version += 1


def test_killed_at_any_moment_it_is_the_old_or_the_new(store: TensorStore) -> None:
    """Fault: a mixture of two versions after a crash. Writers are killed 25 times at random moments of a save."""
    source = random.Random(7)
    store.save("x", {"version": 0, "big": torch.zeros(1_000_000, dtype=torch.int64), "small": []})
    last = moved = 0
    for _ in range(25):
        pid = os.fork()
        if pid == 0:  # a fork starts in milliseconds, an interpreter with torch in seconds
            try:
                write_for_ever(store.folder, last + 1)
            finally:
                os._exit(1)
        time.sleep(source.uniform(0.02, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = store.load("x")
        version = found["version"]
        assert version >= last and bool((found["big"] == version).all())
        assert all(bool((t == version).all()) for t in found["small"])
        moved += version > last
        last = version
    assert moved >= 3, "no writer ever finished: nothing was proved"
    store.save("x", {"version": last})
    assert not list(store.folder.glob(".*.tmp")), "what the dead left is removed by the next writer"


def test_the_order_that_a_power_cut_needs(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a rename that reaches the disk before the bytes it names."""
    said: list[str] = []
    write, replace = type(store._queue).write, Path.replace

    def written(queue: Any, buffer: Any, file: Any, offset: int = 0, *, sync: bool = False) -> int:
        done = write(queue, buffer, file, offset, sync=sync)
        said.append(f"write{' and flush' if sync else ''}")
        return done

    def replaced(self: Path, target: Path) -> Path:
        said.append("rename")
        return replace(self, target)

    monkeypatch.setattr(type(store._queue), "write", written)
    monkeypatch.setattr(Path, "replace", replaced)
    flushed = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (said.append("flush folder"), flushed(fd))[1])
    store.save("x", {"t": torch.ones(5_000_000)})
    assert [s for s in said if s != "write"] == ["write and flush", "rename", "flush folder"]


def test_saving_in_the_background(store: TensorStore) -> None:
    """Fault: a failure that a background thread swallows; a save that the process does not wait for."""
    state = {"t": torch.randn(1_000_000)}
    saving = store.save("x", state, wait=False)
    assert saving.wait().nbytes == 4_000_000 and saving.done
    same(store.load("x"), state)
    (store.folder / "y.tensors").mkdir()
    with pytest.raises(IoFailed):
        store.save("y", state, wait=False).wait()
    assert not list(store.folder.glob(".*.tmp"))


def test_two_writers_and_a_reader_never_see_a_mixture(store: TensorStore) -> None:
    """Fault: a reader that reads the head of one version and the tail of the next."""
    stop, failures = threading.Event(), []

    def write(value: int) -> None:
        while not stop.is_set():
            store.save("x", {"t": torch.full((400_000,), value)})

    store.save("x", {"t": torch.full((400_000,), 1)})
    writers = [threading.Thread(target=write, args=(v,)) for v in (1, 2)]
    for thread in writers:
        thread.start()
    try:
        for _ in range(40):
            found = store.load("x")["t"]
            failures += [found] if int(found.min()) != int(found.max()) else []
    finally:
        stop.set()
        for thread in writers:
            thread.join()
    assert not failures


def open_files() -> int:
    """How many descriptors this process has; 0 where nobody tells."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def test_nothing_leaks(store: TensorStore) -> None:
    """Fault: a descriptor or a request per save."""
    state = {"t": torch.ones(20_000), "s": torch.ones(3)}
    store.save("x", state)
    store.load("x")
    before = open_files()
    for _ in range(200):
        store.save("x", state)
        store.load("x")
    assert open_files() <= before and store._queue.pending == ()


@pytest.mark.gpu
def test_gpu_tensors_come_back_on_their_gpu(store: TensorStore) -> None:
    """Fault: bytes that leave the GPU before the kernel that makes them has run."""
    big = torch.zeros(30_000_000, device="cuda")
    for _ in range(20):
        big += 1  # still under way when save is called
    state = {
        "big": big,
        "half": torch.randn(70_001, device="cuda").half(),
        "step": torch.tensor(3.0),
        "host": torch.ones(5),
    }
    store.save("x", state)
    back = store.load("x")
    assert {k: v.device for k, v in back.items()} == {k: v.device for k, v in state.items()}
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
    on_host = store.load("x", device="cpu")
    assert torch.equal(on_host["big"], big.cpu())
    big.zero_()
    store.load_into("x", state)
    assert float(big.min()) == 20.0
    saving = store.save("y", state, wait=False)
    saving.wait()
    assert torch.equal(store.load("y")["big"], big)


@pytest.mark.gpu
def test_a_gpu_that_is_not_here_is_named(store: TensorStore) -> None:
    """Fault: a CUDA error from deep inside, without the way out."""
    entry = tf.Entry("float32", (2,), (1,), "cuda:99", 4096, 8)
    from deepspeed_ops.tensor_store import _device

    with pytest.raises(UsageError, match="cuda:99"):
        _device(entry, None)
    assert _device(entry, "cpu") == torch.device("cpu")
