"""Fixtures of the op suite: seeds from test ids, SIMD levels of this CPU, tools that CI must have, the devices."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable

import pytest
import torch

LEVELS = ("scalar", "avx2", "avx512", "neon")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator seeded from the test's id: the same numbers whatever else runs."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.rpartition("/")[2].encode()))


@pytest.fixture
def tool() -> Callable[[str], str]:
    """Path of a program; where it is missing the test is skipped, and in CI it fails."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            if os.environ.get("CI", "").lower() in ("true", "1"):
                pytest.fail(f"{name} is not installed, and CI=true")
            pytest.skip(f"{name} is not installed")
        return path

    return find


@pytest.fixture
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces the SIMD level in the test's parameter; skipped where this CPU lacks it."""
    from deepspeed_ops.cpu_adam import simd_level, simd_levels

    wanted = str(request.param)
    if wanted not in simd_levels():
        pytest.skip(f"this CPU has no {wanted}; it has {', '.join(simd_levels())}")
    monkeypatch.setenv("DS_SIMD", wanted)
    assert simd_level() == wanted
    return wanted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU where there is one."""
    return torch.device(request.param)


def pytest_configure(config: pytest.Config) -> None:
    """The marker of tests that need tens of gigabytes."""
    config.addinivalue_line("markers", "large: needs tens of gigabytes of GPU memory")
