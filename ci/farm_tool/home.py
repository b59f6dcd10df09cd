"""The farm's folder. Everything in it can be deleted and made again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from op_builder.settings import Settings
from op_builder.store import Store

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Farm:
    """Where the farm keeps things.

    Attributes:
        root: ``DS_FARM_DIR``, else ``deepspeed-farm`` in the user's cache folder.
    """

    root: Path

    @classmethod
    def of(cls, env: Mapping[str, str], given: Path | None = None) -> Farm:
        """The farm of an environment; ``given`` overrides it."""
        if given is not None:
            return cls(given.absolute())
        if env.get("DS_FARM_DIR"):
            return cls(Path(env["DS_FARM_DIR"]).absolute())
        cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or "/tmp", ".cache"))
        return cls(Path(cache, "deepspeed-farm").absolute())

    @property
    def store(self) -> Store:
        """Parts by their key, of every cell and of the ship set."""
        return Store(self.root / "store", "package", logs=self.root / "logs")

    @property
    def compilers(self) -> Path:
        """One folder per NVRTC, named by its requirement."""
        return self.root / "compilers"

    @property
    def records(self) -> Path:
        """One JSON file per cell, and those of the sets."""
        return self.root / "records"

    @property
    def engine(self) -> Path:
        """An engine of the farm's own."""
        return self.root / "engine"

    @property
    def contexts(self) -> Path:
        """What is handed to an engine, a folder per cell."""
        return self.root / "contexts"


def settings_of(env: Mapping[str, str], jobs: int | None, memory_gb: float | None) -> Settings:
    """The environment as the compilers see it: the user's flags and arch list do not count, parts must be equal.

    Args:
        env: the process's.
        jobs: parallel compilers.
        memory_gb: what they may take together; a compiler is counted as half a gigabyte.
    """
    ignored = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME")
    kept = {k: v for k, v in env.items() if k not in ignored and not k.startswith("DS_BUILD_")}
    settings = Settings.read(kept)
    if jobs is None and memory_gb is not None:
        jobs = max(1, min(os.cpu_count() or 1, int(memory_gb * 2)))
    return replace(settings, max_jobs=jobs) if jobs is not None else settings
