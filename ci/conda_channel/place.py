"""Where one proof keeps what, and the environment its builds see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rattler.index

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "recipe"
BUILD_PLATFORM = "linux-64"
CROSS_PLATFORM = "linux-aarch64"
# Variables that would change what is built or found; a login shell's are nobody else's business.
_FOREIGN = (
    "CUDA",
    "DS_",
    "PYTHON",
    "CXX",
    "CC",
    "CFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "TORCH_",
    "CONDA",
    "MAMBA",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True)
class Place:
    """Folders, all below ``root``."""

    root: Path = ROOT / "build" / "conda"

    @property
    def wheels(self) -> Path:
        """What pip fetched."""
        return self.root / "wheels"

    @property
    def standins(self) -> Path:
        """The channel that stands for conda-forge."""
        return self.root / "standins"

    @property
    def channel(self) -> Path:
        """The channel with what we built."""
        return self.root / "channel"

    @property
    def work(self) -> Path:
        """For unpacking."""
        return self.root / "work"

    @property
    def channels(self) -> list[str]:
        """Both channels, ours first."""
        return [self.channel.as_uri(), self.standins.as_uri()]


def index(channel: Path) -> None:
    """Write a channel's repodata."""
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    asyncio.run(rattler.index.index_fs(channel, force=True, write_zst=False, write_shards=False))


@contextlib.contextmanager
def environment(place: Place) -> Iterator[None]:
    """What rattler-build shall see, since it reads the process's own environment: patchelf and the system, no more."""
    kept = dict(os.environ)
    for name in [n for n in kept if n.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ.update(
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        RATTLER_CACHE_DIR=str(place.root / "cache"),
        LC_ALL="C.UTF-8",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
