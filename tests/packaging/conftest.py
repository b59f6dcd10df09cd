"""Builds of this checkout, made once for all packaging tests, from a copy in a folder whose name holds a space."""

from __future__ import annotations

from pathlib import Path

import pytest
from builds import ARCHS, build, copy_checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout under a path with a space."""
    return copy_checkout(tmp_path_factory.mktemp("a b") / "src")


@pytest.fixture(scope="session")
def plain_wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that nobody asked ops of."""
    return build(checkout, tmp_path_factory.mktemp("plain"), "--wheel")[0][0]


@pytest.fixture(scope="session")
def full(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(wheel, output) with every op that can be built here, for two GPU architectures."""
    out = tmp_path_factory.mktemp("full")
    files, output = build(checkout, out, "--wheel", DS_BUILD_OPS="1", TORCH_CUDA_ARCH_LIST=ARCHS, MAX_JOBS="2")
    return files[0], output


@pytest.fixture(scope="session")
def full_wheel(full: tuple[Path, str]) -> Path:
    """The wheel with parts."""
    return full[0]
