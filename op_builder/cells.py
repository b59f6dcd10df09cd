"""The cells of the build farm: one CUDA release x torch release x GPU architecture each, and what each is called.

Pure. Image tags, bake targets and conda build strings are all made here from one value, and read back here, so they
cannot disagree; what a cell runs on is the resolver's word, asked for the cell's own parts.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from .errors import UsageError
from .matrix import Capability, Matrix, dotted, load
from .targets import Target

REPOSITORY = "ds"
_NAME = re.compile(r"(?:cpu|cu(\d{2})(\d)(?:-torch(\d+\.\d+))?-sm(\d{1,2})(\d))")
_CONDA = re.compile(r"(?:cpu|cuda(\d{2})(\d)(?:_torch(\d+\.\d+))?(?:_sm(\d{1,2})(\d))?)_(\d+)")

Release = tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        cuda: CUDA release; None for the cell without CUDA.
        torch: torch release; None where no official wheel exists, and then the cell is GPU parts without an image.
        capability: the GPU architecture; None without CUDA.
        default: whether its torch is the default one of its CUDA release, which the short tag names.
    """

    cuda: Release | None
    torch: str | None
    capability: Capability | None
    default: bool = True

    @property
    def name(self) -> str:
        """The short name where it has one: ``cu121-sm86``, ``cu121-torch2.5-sm86``, ``cpu``."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, the shortest first."""
        if self.cuda is None or self.capability is None:
            return ("cpu",)
        cuda, arch = f"cu{self.cuda[0]}{self.cuda[1]}", f"sm{self.capability[0]}{self.capability[1]}"
        if self.torch is None:
            return (f"{cuda}-{arch}",)
        whole = f"{cuda}-torch{self.torch}-{arch}"
        return (f"{cuda}-{arch}", whole) if self.default else (whole,)

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of its image; none for a cell without one."""
        return tuple(f"{REPOSITORY}:{name}" for name in self.names) if self.torch is not None else ()

    @property
    def bake_target(self) -> str:
        """Its target in ``docker/docker-bake.hcl``, where names hold no dot."""
        return self.name.replace(".", "-")

    @property
    def target(self) -> Target | None:
        """The machine code it holds."""
        return Target(*self.capability) if self.capability is not None else None


def conda_build(cell: Cell, number: int = 0) -> str:
    """The conda build string of a cell: ``cuda121_torch2.4_sm86_0``, ``cpu_0``.

    A package of the whole ship set has no architecture and needs no torch: give a cell without them, and it is
    ``cuda121_0``.
    """
    if cell.cuda is None:
        return f"cpu_{number}"
    words = [f"cuda{cell.cuda[0]}{cell.cuda[1]}"]
    words += [f"torch{cell.torch}"] if cell.torch is not None else []
    words += [f"sm{cell.capability[0]}{cell.capability[1]}"] if cell.capability is not None else []
    return "_".join([*words, str(number)])


def cell_of_conda_build(text: str, known: Matrix | None = None) -> tuple[Cell, int]:
    """The cell and the number of a conda build string.

    Raises:
        UsageError: it is none of ours.
    """
    match = _CONDA.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no build string of ours", "expected cuda121_torch2.4_sm86_0 or cpu_0", "")
    tables = known if known is not None else load()
    if match[1] is None:
        return Cell(None, tables.torch_cpu, None), int(match[6])
    cuda = int(match[1]), int(match[2])
    arch = (int(match[4]), int(match[5])) if match[4] else None
    return Cell(cuda, match[3], arch, match[3] in (None, default_torch(cuda, tables))), int(match[6])


def default_torch(cuda: Release, known: Matrix | None = None) -> str | None:
    """The torch that a CUDA release's short tags name: the newest that plain pip brings for it, else its newest."""
    tables = known if known is not None else load()
    releases = tables.release(cuda).torch
    by_pip = [torch for torch in releases if tables.torch_pip[torch] == cuda]
    newest = by_pip or releases
    return newest[-1] if newest else None


def cells(known: Matrix | None = None) -> tuple[Cell, ...]:
    """Every cell, the one without CUDA first, then by CUDA, torch and architecture."""
    tables = known if known is not None else load()
    found = [Cell(None, tables.torch_cpu, None)]
    for cuda, row in tables.cuda.items():
        default = default_torch(cuda, tables)
        archs = [a for a in tables.archs.values() if a.cell and a.known_to(cuda)]
        for torch in row.torch:
            found += [Cell(cuda, torch, a.capability, torch == default) for a in archs if not a.tegra]
        found += [Cell(cuda, None, a.capability) for a in archs if a.tegra or not row.torch]
    return tuple(found)


def find_cell(name: str, known: Matrix | None = None) -> Cell:
    """The cell of a name or an image tag.

    Raises:
        UsageError: there is none; ``why`` says what cannot be, ``fix`` the nearest name there is.
    """
    tables = known if known is not None else load()
    by_name = {n: cell for cell in cells(tables) for n in cell.names}
    short = name.removeprefix(f"{REPOSITORY}:")
    if short in by_name:
        return by_name[short]
    match = _NAME.fullmatch(short)
    arch_part = short[short.rfind("-") :] if match is not None and match[1] is not None else ""
    same_arch = [n for n in by_name if arch_part and n.endswith(arch_part)]
    close = difflib.get_close_matches(short.casefold(), same_arch or by_name, 1, cutoff=0.0)
    fix = f"ci/farm build {close[0]}"
    if match is None or match[1] is None:
        raise UsageError(f"no cell is named {name!r}", "names look like cu121-sm86 and cu121-torch2.4-sm86", fix)
    cuda, arch = (int(match[1]), int(match[2])), (int(match[4]), int(match[5]))
    raise UsageError(f"cell {name!r} cannot be", _impossible(cuda, match[3], arch, tables), fix)


def _impossible(cuda: Release, torch: str | None, capability: Capability, tables: Matrix) -> str:
    """What stands against a cell whose name is well formed."""
    row, arch = tables.cuda.get(cuda), tables.archs.get(capability)
    if row is None:
        return f"CUDA {dotted(cuda)} is not in ci/matrix.toml, which has {', '.join(map(dotted, tables.cuda))}"
    code = f"sm_{capability[0]}{capability[1]}"
    if arch is None:
        return f"{code} is not in ci/matrix.toml"
    if not arch.known_to(cuda):
        until = f" until CUDA {dotted(arch.last)}" if arch.last else ""
        return f"compilers know {code} ({arch.name}) since CUDA {dotted(arch.first)}{until}; this one is {dotted(cuda)}"
    if torch is not None and torch not in row.torch:
        made = ", ".join(row.torch) or "no release yet"
        return f"torch {torch} has no official wheel for CUDA {dotted(cuda)}; those have: {made}"
    if arch.tegra and torch is not None:
        alone = Cell(cuda, None, capability).name
        return f"{code} is a system-on-chip, for which torch has no official wheel: {alone} is GPU parts alone"
    return f"{code} has no cells: [arch] of ci/matrix.toml marks those that have (cell = true)"
