"""``async_io``'s library under ThreadSanitizer and AddressSanitizer; both must be able to fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PLANTED = {"thread": ("race", "data race"), "address": ("overflow", "heap-buffer-overflow")}


@pytest.mark.skipif(sys.platform != "linux", reason="gcc's sanitizers are Linux'")
@pytest.mark.parametrize("sanitizer", sorted(PLANTED))
def test_sanitizer(sanitizer: str, tmp_path: Path, tool: Callable[[str], str]) -> None:
    """Fault: a race or an overflow that the bytes do not show."""
    program, source = tmp_path / "stress", ROOT / "tests" / "ops" / "native" / "io_stress.cpp"
    flags = [
        "-O1",
        "-g1",
        "-std=c++17",
        "-pthread",
        f"-fsanitize={sanitizer}",
        f"-I{ROOT / 'csrc'}",
        "-Wall",
        "-Werror",
    ]
    built = subprocess.run(
        [tool("g++"), *flags, str(source), "-o", str(program), "-ldl"],
        capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    # ThreadSanitizer of gcc 12 knows fewer layouts of the address space than new kernels make at random.
    plain = [setarch, os.uname().machine, "-R"] if (setarch := shutil.which("setarch")) else []

    def run(*planted: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*plain, str(program), str(tmp_path), "10", *planted],
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"},
            capture_output=True, encoding="utf-8", errors="replace", timeout=240, check=False,
        )  # fmt: skip

    honest = run()
    assert honest.returncode == 0 and "rounds" in honest.stdout, honest.stdout + honest.stderr[-6000:]
    plant, said = PLANTED[sanitizer]
    seen = run(plant)
    assert seen.returncode != 0 and said in seen.stderr, seen.stderr[-3000:]
