"""Guards against an image that greets wrongly, swallows a command, or calls itself healthy when it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_ops.op_builder.gpus import Device, Driver
from deepspeed_ops.op_builder.host import HostFacts
from deepspeed_ops.op_builder.resolve import BUILD, EXACT, Accepted, Rejected, Resolution

from deepspeed_ops import container

CPU = HostFacts("linux", "x86_64", "glibc", (2, 36))
GPU = HostFacts(
    "linux", "x86_64", "glibc", (2, 36), driver=Driver("580.1", (13, 0)),
    devices=(Device(0, "GPU-1", "NVIDIA H200", (9, 0), 1 << 30),),
)  # fmt: skip


def found(op: str, action: str) -> Resolution:
    # Any part will do: the greeting asks whether there is one.
    part = object() if action == "load" else None
    choices = {
        "load": Accepted("p", EXACT, part),  # type: ignore[arg-type]
        "build": Accepted("build sm90 here with nvrtc 12.1", BUILD),
        "fail": None,
    }
    trace = (choices[action] or Rejected("p", "arch", "no"),)
    return Resolution(op, "here", choices[action], trace)  # type: ignore[arg-type]


def test_three_lines_whatever_is_there() -> None:
    """Fault: a greeting that grows, or says nothing of what is missing."""
    lines = container.greeting("cu121-sm86", CPU, [found("a", "load"), found("b", "load")])
    assert lines[0] == "deepspeed ops: cu121-sm86" and "none visible" in lines[1] and lines[2] == "2 of 2 ops ready"
    lines = container.greeting("cu121-sm86", GPU, [found("a", "load"), found("a", "build"), found("b", "load")])
    assert lines[1] == "GPUs: NVIDIA H200 (9.0)"
    assert lines[2].startswith("1 of 2 ops ready; a compiled at first use, this image holds no part for it")
    assert "build sm90 here with nvrtc 12.1" in lines[2]
    lines = container.greeting("cpu", GPU, [found("a", "fail"), found("b", "load")])
    assert len(lines) == 3 and lines[2] == "1 of 2 ops ready; a cannot run here: ds_report says why"


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join([str(root / "src")])
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_ops.container", *words], stdin=subprocess.DEVNULL, capture_output=True,
        env={**os.environ, "PYTHONPATH": paths, **env}, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip


def test_it_becomes_the_command() -> None:
    """Fault: an exit code lost, output of the greeting in the output of the command."""
    done = run("run", "sh", "-c", "echo $DS_CELL; exit 3", DS_CELL="cpu")
    assert done.returncode == 3 and done.stdout == "cpu\n" and done.stderr.startswith("deepspeed ops: cpu\n")
    assert len(done.stderr.splitlines()) == 3
    done = run("run", "no-such-command")
    assert done.returncode == 127 and "no-such-command: No such file" in done.stderr
    assert run("run").returncode == 0 and run("whatever").returncode == 2


def test_a_broken_setting_does_not_keep_the_command_from_running() -> None:
    """Fault: a mistyped variable, and the container does not start."""
    done = run("run", "echo", "here", DS_BUILD_FUSED_ADAMM="1")
    assert done.returncode == 0 and done.stdout == "here\n" and "DS_BUILD_FUSED_ADAM" in done.stderr


def test_without_a_temporary_folder_shared_memory_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: torch itself does not import in a read-only container without a tmpfs."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    assert container.temporary({}) == {}
    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setattr("os.access", lambda path, mode: path == "/dev/shm")
    assert container.temporary({}) == {"TMPDIR": "/dev/shm"} and container.temporary({"TMPDIR": "/x"}) == {}


def test_health_fails_where_an_op_cannot_be_loaded(tmp_path: Path) -> None:
    """Fault: a health check that looks at nothing."""
    env = {"DS_JIT": "0", "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_OPS_PATH": "", "HOME": str(tmp_path)}
    done = run("health", **env)
    assert done.returncode == 1 and "cpu_adam: " in done.stderr and "cpu_adam: ok" not in done.stdout
