"""GPU kernels on the CPU: an op's .cu file compiled by g++ (native/emulator.h), behind the launcher's face.

So the kernels, the structures that Python fills and the order of launches are tested on machines without a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_ops.op_builder.spec import get_spec
from torch import Tensor

from deepspeed_ops import device_table, launch

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = Path(__file__).resolve().parent / "native"
# What only a GPU's assembler knows, by the same conversions on the host.
ASSEMBLER = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));': "r = emulated_half_to_float(bits);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));': "bits = emulated_float_to_half(x);",
}


def build(op: str, folder: Path) -> Path:
    """The kernels of an op as a library with one function, ``run(name, parameters, grid, block)``."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    csrc = folder / "csrc"
    shutil.copytree(ROOT / "csrc" / "common", csrc / "common")
    shutil.copytree(ROOT / "csrc" / op, csrc / op)
    device = csrc / "common" / "device.cuh"
    text = device.read_text(encoding="utf-8")
    for instruction, instead in ASSEMBLER.items():
        assert instruction in text
        text = text.replace(instruction, instead)
    device.write_text(text, encoding="utf-8")
    spec = get_spec(op)
    lines = [f'#include "{NATIVE / "emulator.h"}"', *(f'#include "{source}"' for source in spec.device)]
    lines += ['extern "C" int run(const char* name, void** p, unsigned grid, unsigned block) {']
    for kernel in spec.kernels:
        lines += [f'  if (!strcmp(name, "{kernel}"))']
        lines += [f"    return emulator::launch([](void** q) {{ emulator::call({kernel}, q); }}, p, grid, block), 0;"]
    source, library = folder / f"{op}.cpp", folder / f"{op}.so"
    source.write_text("\n".join([*lines, "  return 1;", "}"]) + "\n", encoding="utf-8")
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{csrc}"]
    done = subprocess.run(
        [compiler, *flags, str(source), "-o", str(library)],
        capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return library


class EmulatedLauncher:
    """``launch.Launcher`` over such a library.

    Attributes:
        launched: names of the kernels launched so far.
    """

    collect_addresses: Callable[[int], int] | None = None

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).run
        self._run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.launched: list[str] = []

    def prepare_device(self, ordinal: int) -> None:
        """Nothing to load."""

    def launch(self, args: int) -> None:
        """Run a kernel to its end."""
        a = launch._LaunchArgs.from_address(args)
        name = ctypes.string_at(a.kernel)
        self.launched.append(name.decode())
        assert self._run(name, a.parameters, a.grid, a.block) == 0, f"no kernel {name!r}"


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, launchers: Callable[[str], EmulatedLauncher]) -> None:
    """Let CPU tensors pass for a GPU's: no pinned memory, no streams."""
    monkeypatch.setattr(launch, "launcher", launchers)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(
        device_table.DeviceTable, "_pinned", lambda self: torch.empty(self.host.shape, dtype=torch.int64)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0, raising=False)


def count_on_device(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step count as with counters in device memory."""

    def count(counters: Tensor, scalars: Any) -> None:
        step._count_on_device(counters, scalars, None, launch.Control(), 0)

    monkeypatch.setattr(step, "_count_on_host", count)
