"""What lies in the stores, and where they lie: for the report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_ops.op_builder.cleaning import size_of
from deepspeed_ops.op_builder.host import filesystem_of, is_network_filesystem
from deepspeed_ops.op_builder.store import Part, Store, Unreadable

_OWN = {".work": "work", ".logs": "logs", ".compilers": "compilers"}


@dataclass(frozen=True)
class StoreLine:
    """One store.

    Attributes:
        root: its folder.
        origin: which kind of store.
        exists: whether the folder is there.
        writable: whether this process may write there.
        filesystem: type of its file system; ``""`` where that cannot be told.
        network: whether other machines may see it too.
        parts: number of parts.
        unreadable: number of parts without a readable manifest.
        bytes: of the parts.
        leavings: bytes of builders' folders, logs and fetched compilers, by kind.
    """

    root: str
    origin: str
    exists: bool
    writable: bool
    filesystem: str
    network: bool
    parts: int
    unreadable: int
    bytes: int
    leavings: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


def store_lines(stores: Sequence[Store], ops: Sequence[str]) -> tuple[StoreLine, ...]:
    """Look into stores; reads manifests and sizes only."""
    return tuple(_line(store, ops) for store in stores)


def _line(store: Store, ops: Sequence[str]) -> StoreLine:
    found = [part for op in ops for part in store.parts(op)]
    kind = filesystem_of(store.root)
    return StoreLine(
        root=str(store.root),
        origin=store.origin,
        exists=store.root.is_dir(),
        writable=os.access(_nearest(store.root), os.W_OK),
        filesystem=kind,
        network=is_network_filesystem(kind),
        parts=sum(isinstance(p, Part) for p in found),
        unreadable=sum(isinstance(p, Unreadable) for p in found),
        bytes=sum(p.manifest.size for p in found if isinstance(p, Part)),
        leavings={name: size for folder, name in _OWN.items() if (size := size_of(store.root / folder))},
    )


def _nearest(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next((p for p in (path, *path.parents) if p.exists()), path)
