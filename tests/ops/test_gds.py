"""GPU memory of ``async_io`` and ``gds``: with a stand-in for driver and cuFile, and on a GPU with marker ``gpu``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_ops.op_builder.errors import TensorError
from io_files import BACKENDS, available, contents

from deepspeed_ops import async_io, gds
from deepspeed_ops.async_io import aio_handle
from deepspeed_ops.gds import gds_handle

HERE = Path(__file__).parent


# ---- a stand-in -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in under both libraries' names."""
    if sys.platform != "linux":
        pytest.skip("the stand-in is built for Linux")
    folder = tmp_path_factory.mktemp("gpu")
    source = HERE / "native" / "fake_gpu.cpp"
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, timeout=120)
    # One library, two names: cuFile's calls and the driver's share the counters.
    (folder / "libcufile.so.0").symlink_to(folder / "libcuda.so.1")
    return folder


@pytest.mark.parametrize(("op", "cufile"), [("async_io", 0), ("gds", 0), ("gds", 5001)])
def test_bytes_through_a_stand_in(
    op: str, cufile: int, stand_in: Path, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    """Fault: device memory used by address, an edge that writes beside it, a context that is not current, a leak."""
    tool("g++")
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_stand_in.py"), op, str(tmp_path), str(cufile)],
        env={**os.environ, "LD_LIBRARY_PATH": str(stand_in), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    assert seen["requests"] >= 28 and seen["to_host"] > 0 and seen["streams"] == seen["events"] == seen["pinned"] == 0
    assert (seen["cufile_reads"] > 0 and seen["cufile_writes"] > 0) is (op == "gds" and cufile == 0)
    assert seen["files"] == seen["buffers"] == 0


# ---- the names --------------------------------------------------------------------------------------------------


def test_without_cufile_the_handle_works_and_says_so(tmp_path: Path) -> None:
    """Fault (DeepSpeed): exit(), a file in the current folder, a variable nobody expands."""
    before = sorted(Path.cwd().iterdir()), os.environ.get("CUFILE_ENV_PATH_JSON")
    handle = gds_handle(4096, 8, False, True, 2)
    works, why = handle.cufile
    assert isinstance(works, bool) and ("cufile" in why.lower() or "cuFile" in why)
    tensor = torch.arange(5000)
    assert (
        handle.sync_pwrite(tensor, tmp_path / "f") == 1 and handle.async_pread(got := tensor * 0, tmp_path / "f") == 0
    )
    assert handle.wait() == 1 and torch.equal(got, tensor)
    assert (sorted(Path.cwd().iterdir()), os.environ.get("CUFILE_ENV_PATH_JSON")) == before
    for call in (handle.pin_device_tensor, lambda t: handle.new_pinned_device_tensor(5, t)):
        with pytest.raises(TensorError, match="is on cpu"):
            call(tensor)
    assert handle.unpin_device_tensor(tensor) is False and gds.module() is gds
    handle.close()


# ---- a real GPU -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[(name, kind) for name in BACKENDS for kind in ("async_io", "gds")], ids=lambda p: "-".join(p))
def handle(request: pytest.FixtureRequest) -> Any:
    """A handle of each kind and backend."""
    backend, kind = request.param
    made = gds_handle if kind == "gds" else aio_handle
    return made(1 << 20, 32, False, True, 2, backend=available(backend))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 4095, 4096, 1_000_003, (64 << 20) + 5])
def test_gpu_bytes(handle: Any, n: int, tmp_path: Path) -> None:
    """Fault: GPU memory used by address, a tail that is lost, a view's offset forgotten."""
    room = torch.zeros(n + 7, dtype=torch.uint8, device="cuda")
    sent = torch.randint(0, 255, (n + 7,), dtype=torch.uint8, device="cuda")
    for lead, offset in ((0, 0), (3, 1), (7, 4096)):
        (tmp_path / "f").write_bytes(b"\xaa" * 5000)
        part = sent[lead : lead + n]
        assert handle.sync_pwrite(part, tmp_path / "f", offset) == 1
        assert contents(tmp_path / "f")[offset : offset + n] == part.cpu().numpy().tobytes()
        assert contents(tmp_path / "f")[:offset] == (b"\xaa" * 5000)[:offset].ljust(offset, b"\0")
        room.zero_()
        handle.async_pread(room[lead : lead + n], tmp_path / "f", offset)
        assert handle.wait() == 1
        assert torch.equal(room[lead : lead + n], part) and not room[:lead].any() and not room[lead + n :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_gpu_streams(handle: Any, side: bool, tmp_path: Path) -> None:
    """Fault: a write reads before the kernel that makes the data has run, a read lands before the last use is over."""
    n, stream = 16 << 20, torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for turn in range(5):
            x = torch.zeros(n, device="cuda")
            torch.cuda._sleep(50_000_000)
            x.add_(turn + 1)
            handle.async_pwrite(x, tmp_path / "f")
            handle.wait()
            y = torch.full((n,), -1.0, device="cuda")
            torch.cuda._sleep(50_000_000)
            z = y + 0
            handle.sync_pread(y, tmp_path / "f")
            assert bool((y == turn + 1).all()) and bool((z == -1).all())


@pytest.mark.gpu
def test_gpu_and_torch_pinned_memory(tmp_path: Path) -> None:
    """Fault: pinned tensors of torch are not known, or take a copy they do not need."""
    handle, x = aio_handle(), torch.arange(1_000_000).pin_memory()
    assert handle.is_pinned(x) and handle.is_pinned(x[5:]) and not handle.is_pinned(x.cuda())
    handle.sync_pwrite(x, tmp_path / "f")
    handle.sync_pread(y := torch.empty_like(x).pin_memory(), tmp_path / "f")
    assert torch.equal(x, y)


@pytest.mark.gpu
def test_gpu_failures(tmp_path: Path) -> None:
    """Fault: a failure of a GPU request ends the process, or leaves the handle unusable."""
    handle, x = gds_handle(), torch.zeros(1 << 20, device="cuda")
    with pytest.raises(OSError, match="ENOENT"):
        handle.sync_pread(x, tmp_path / "none")
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(OSError, match="ENODATA"):
        handle.sync_pread(x, tmp_path / "f")
    with pytest.raises(TensorError, match="strides"):
        handle.sync_pwrite(x.view(1024, -1).t(), tmp_path / "f")
    tensor = handle.new_pinned_device_tensor(1000, x)
    assert tensor.is_cuda and handle.pin_device_tensor(x) and handle.unpin_device_tensor(x)
    assert handle.free_pinned_device_tensor(tensor) and not handle.free_pinned_device_tensor(tensor)
    handle.sync_pwrite(x, tmp_path / "f", fsync=True)
    assert (tmp_path / "f").stat().st_size == x.nbytes
    handle.close()


@pytest.mark.gpu
def test_gpu_a_tensor_dropped_in_flight(tmp_path: Path) -> None:
    """Fault: the caching allocator hands the memory to somebody else while the copy still runs."""
    handle = async_io.aio_handle(1 << 20, 8)
    for i in range(10):
        handle.async_pwrite(torch.full((4 << 20,), float(i), device="cuda"), tmp_path / f"{i}")
        torch.full((4 << 20,), -5.0, device="cuda")
    assert handle.wait() == 10
    for i in range(10):
        handle.sync_pread(back := torch.empty(4 << 20, device="cuda"), tmp_path / f"{i}")
        assert bool((back == i).all())


@pytest.mark.gpu
def test_gpu_devices(tmp_path: Path) -> None:
    """Fault: the copy runs in the context of device 0 whatever the tensor's device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    handle, x = aio_handle(), torch.arange(1_000_000, device="cuda:1")
    handle.sync_pwrite(x, tmp_path / "f")
    handle.sync_pread(y := torch.empty_like(x), tmp_path / "f")
    assert torch.equal(x, y) and torch.cuda.current_device() == 0
