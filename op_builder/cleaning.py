"""What a store no longer needs: damaged parts, leavings of killed builders, and what nobody has used for a while.

A shared store serves other machines, environments and versions too: a part that *this* installation cannot use may be
somebody else's. So only what nobody can use goes at once; the rest goes by age.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CorruptPart
from .files import FILES
from .store import Part, Store, inspect

_DAY_S = 24 * 3600.0
_WORK_DAYS = 1.0  # a build that takes longer than this is dead


@dataclass(frozen=True)
class Removal:
    """Something that goes, or would go: what, why, its bytes, and whether it is gone."""

    path: Path
    why: str
    size: int
    gone: bool


def clean(store: Store, days: float = 30.0, *, everything: bool = False, dry_run: bool = False) -> tuple[Removal, ...]:
    """Remove what a JIT store no longer needs. Lock files stay: deleting one that is held would split the lock in two.

    Args:
        store: its folder.
        days: age by last use (the younger of modification and access time) from which a whole part goes.
        everything: every part and log goes, however young.
        dry_run: only say what would go.

    Returns:
        What went, in the order of the paths. A part that a process on Windows has loaded stays and says so.
    """
    found = sorted(_candidates(store, 0.0 if everything else days, everything), key=lambda c: c[0])
    return tuple(
        Removal(path, why, size_of(path), _remove(store, path) if not dry_run else False) for path, why in found
    )


def forget(store: Store, dry_run: bool = False) -> tuple[Removal, ...]:
    """Drop what loading taught about parts: quarantine and crash markers. Locks of loads under way stay."""
    found = []
    with contextlib.suppress(OSError):
        found = sorted(p for p in (store.root / ".marks").iterdir() if p.suffix == ".json")
    return tuple(Removal(p, "a verdict", size_of(p), False if dry_run else FILES.remove(p)) for p in found)


def _candidates(store: Store, days: float, everything: bool) -> Iterator[tuple[Path, str]]:
    for op in _folders(store.root):
        for part in store.parts(op.name):
            folder = part.path.parent
            if not isinstance(part, Part):
                yield folder, f"unreadable: {part.why.splitlines()[0]}"
                continue
            try:
                inspect(part)
            except CorruptPart as exc:
                yield folder, f"damaged: {exc.why}"
                continue
            if everything:
                yield folder, "everything was asked for"
            elif (age := _age_days(part.path)) >= days:
                yield folder, f"not used for {age:.0f} days"
        yield from (
            (f, "holds no part") for f in _folders(op) if not any(f.glob("*.json")) and _age_days(f) >= _WORK_DAYS
        )
    for name, limit, what in (
        (".work", _WORK_DAYS, "left behind by a builder"),
        (".logs", days, "an old log"),
        (".marks", days, "an old verdict"),
        (".compilers", days, "a fetched compiler"),
    ):
        with contextlib.suppress(OSError):
            for entry in (store.root / name).iterdir():
                if _age_days(entry) >= limit and entry.suffix != ".lock":
                    yield entry, what


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def _age_days(path: Path) -> float:
    try:
        facts = path.stat()
    except OSError:
        return 0.0
    return max(0.0, time.time() - max(facts.st_mtime, facts.st_atime if path.is_file() else 0.0)) / _DAY_S


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    total = 0
    with contextlib.suppress(OSError):
        if path.is_file():
            return path.stat().st_size
        for file in path.rglob("*"):
            with contextlib.suppress(OSError):
                total += file.stat().st_size if file.is_file() else 0
    return total


def _remove(store: Store, path: Path) -> bool:
    if path.is_file():
        return FILES.remove(path)
    if path.parent.name != ".work":  # readers see a whole part or none
        return store.discard(path)
    return FILES.remove_tree(path)
