"""What no cell and no set needs any more."""

from __future__ import annotations

from pathlib import Path

from op_builder.cells import cells
from op_builder.files import FILES
from op_builder.matrix import load

from . import sets
from .parts import Workplace, plans_of
from .records import SETS


def candidates(place: Workplace) -> list[Path]:
    """Folders and files of the farm that can go: parts of other keys, compilers of other releases, what a killed
    process left, contexts of images, records of cells that are gone."""
    wants = sorted({*sets.wants_of_cells(cells()), *sets.wants_of_ship()})
    store, farm = place.farm.store, place.farm
    kept = {store.final_folder(p.op, p.variant, p.key) for p in plans_of(place, wants, True)}
    found = [f for f in sorted(store.root.glob("[!.]*/*")) if f not in kept]
    found += sorted((store.root / ".work").glob("*"))
    names = {row.nvrtc for row in load().cuda.values()} | {f"{load().ffi_package}=={load().ffi_minimum}"}
    found += [f for f in sorted(farm.compilers.glob("*")) if f.name not in names and f.name != ".locks"]
    found += sorted(farm.contexts.glob("*"))
    records = {cell.name for cell in cells()} | set(SETS)
    found += [f for f in sorted(farm.records.glob("*.json")) if f.stem not in records]
    return found


def bytes_of(path: Path) -> int:
    """What deleting it frees."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def delete(path: Path) -> bool:
    """Delete one; False where somebody holds it."""
    return FILES.remove_tree(path) if path.is_dir() else FILES.remove(path)
