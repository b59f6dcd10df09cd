"""``async_io``: random interleavings equal a model file, also on a storage that returns short counts and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from io_files import BACKENDS, available
from io_model import KINDS, Asked, Model, queues, requests

from deepspeed_ops import aio
from deepspeed_ops.aio import IoQueue

HERE = Path(__file__).parent


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=requests, options=queues, backend=st.sampled_from(BACKENDS))
def test_interleavings_equal_a_model(plan: list[Asked], options: dict[str, Any], backend: str, tmp_path: Path) -> None:
    """Fault: a combination of offset, size, address, block, depth and threads that nobody thought of."""
    backend = backend if aio.backends()[backend][0] else "threads"
    model = Model(tmp_path / "f")
    with IoQueue(**options, backend=backend) as queue:
        assert model.play(queue, plan, False) == []
    model.check([])


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of ``native/io_faults.cpp``, under the name of libaio."""
    if sys.platform != "linux":
        pytest.skip("the shim speaks Linux' system calls")
    out = tmp_path_factory.mktemp("shim") / "libaio.so.1"
    source = HERE / "native" / "io_faults.cpp"
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libaio.so.1", str(source), "-o", str(out)]
    subprocess.run(command, check=True, timeout=120)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_storage_that_misbehaves(backend: str, shim: Path, tmp_path: Path, tool: Callable[[str], str]) -> None:
    """Fault: a short count taken for all of it, EINTR for a failure, EAGAIN for the end, EIO for success."""
    tool("g++")
    available(backend if backend != "libaio" else "threads")  # the shim is libaio where there is none
    path = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, str(HERE / "io_model.py"), backend, str(tmp_path), "60"],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": path},
        capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    assert seen["made"] > 100 and 0 < seen["failed"] < seen["made"]
    assert all(seen[kind] > 0 for kind in KINDS), seen
