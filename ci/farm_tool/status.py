"""What each cell needs, has and lacks: for ``list``, ``plan`` and the report. Looks at the store, builds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from op_builder.cells import Cell, conda_build
from op_builder.matrix import dotted, load
from op_builder.plan import PartPlan

from . import dockerfile, images, records, sets
from .parts import Workplace, plans_of


@dataclass(frozen=True)
class Planned:
    """The parts of every cell, planned once."""

    host: tuple[PartPlan, ...]
    device: tuple[PartPlan, ...]

    def of(self, cell: Cell) -> list[PartPlan]:
        """Those of one cell."""
        mine = [p for p in self.device if (p.target, p.compiler_release) == (cell.target, cell.cuda)]
        return [*self.host, *mine]


def plan(place: Workplace, chosen: Sequence[Cell]) -> Planned:
    """Plan the parts of these cells; needs a C++ compiler, and no CUDA compiler."""
    found = plans_of(place, sets.wants_of_cells(chosen), True)
    return Planned(tuple(p for p in found if p.kind == "host"), tuple(p for p in found if p.kind == "device"))


def status_of(cell: Cell, place: Workplace, planned: Planned) -> dict[str, Any]:
    """A cell as ``plan --json`` shows it.

    Returns:
        ``status`` is ``built``, ``parts`` (all there, and the image is not), ``changed`` or ``never built``. Names,
        releases, keys of its parts, how many the store has, and whether anything differs from its last build.
    """
    mine = planned.of(cell)
    store = place.farm.store
    held = [p for p in mine if store.final_folder(p.op, p.variant, p.key).is_dir()]
    digest = images.cell_digest(cell, [p.key for p in mine], place.home)
    record = records.read(place.farm, cell.name) or {}
    same = record.get("digest") == digest and len(held) == len(mine)
    image = not cell.tags or bool(record.get("image"))
    status = "never built" if not record else "changed" if not same else "built" if image else "parts"
    return {
        "cell": cell.name,
        "names": list(cell.names),
        "tags": list(cell.tags),
        "bake_target": cell.bake_target if cell.tags else None,
        "conda_build": conda_build(cell),
        "cuda": dotted(cell.cuda) if cell.cuda else None,
        "torch": cell.torch,
        "arch": cell.target.code if cell.target else None,
        "compiler": load().release(cell.cuda).nvrtc if cell.cuda else None,
        "args": dockerfile.arguments(cell) if cell.tags else {},
        "parts": [{"op": p.op, "variant": p.variant, "compiler": p.compiler_name, "key": p.key} for p in mine],
        "in_store": len(held),
        "digest": digest,
        "changed": not (same and image),
        "status": status,
        "image_bytes": record.get("image_bytes"),
        "parts_bytes": record.get("bytes") if same else None,
    }
