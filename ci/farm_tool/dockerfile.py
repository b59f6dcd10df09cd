"""The values that make ``docker/Dockerfile`` the image of one cell; shared by build, bake file and ``render``."""

from __future__ import annotations

import re
from pathlib import Path

from op_builder.cells import Cell, conda_build
from op_builder.errors import UsageError
from op_builder.matrix import dotted, load

from .home import ROOT

DOCKERFILE = Path("docker") / "Dockerfile"
TARGET = "runtime"


def arguments(cell: Cell) -> dict[str, str]:
    """Build arguments of a cell's image, in the order of the file.

    Raises:
        UsageError: the cell has no image.
    """
    if not cell.tags or cell.torch is None:
        why = "there is no official torch wheel for it: it is GPU parts alone"
        raise UsageError(f"cell {cell.name} has no image", why, f"ci/farm build {cell.name} --parts-only")
    tables = load()
    patch = tables.torch_patch[cell.torch]
    # Without CUDA the build is named: the plain requirement would bring a CUDA build.
    made = {"BASE": tables.image.base, "FFI": f"{tables.ffi_package}=={tables.ffi_minimum}"}
    if cell.cuda is not None:
        made |= {"NVRTC": tables.release(cell.cuda).nvrtc, "GPU_PARTS": parts_name(cell)}
    made["TORCH"] = f"torch=={patch}" if cell.cuda is not None else f"torch=={patch}+cpu"
    made |= {"CUDA": dotted(cell.cuda)} if cell.cuda is not None else {}
    return {**made, "CELL": cell.name}


def parts_name(cell: Cell) -> str:
    """The cell whose GPU parts these are too, one name for every torch, so that an engine builds them once."""
    if cell.cuda is None or cell.capability is None:
        return cell.name
    return Cell(cell.cuda, None, cell.capability).name


def labels(cell: Cell) -> dict[str, str]:
    """What an image says of itself beyond the file's own labels."""
    target = cell.target
    made = {"ds.conda-build": conda_build(cell)}
    return made | ({"ds.arch": target.code} if target is not None else {})


def render(cell: Cell, home: Path = ROOT) -> str:
    """The Dockerfile with the values of one cell as defaults: ``docker build -f - .`` builds it without arguments."""
    text = (home / DOCKERFILE).read_text(encoding="utf-8")
    for name, value in arguments(cell).items():
        line = f'ARG {name}="{value}"' if name != "BASE" else f"ARG {name}={value}"
        text, count = re.subn(rf"(?m)^ARG {name}(=.*)?$", line.replace("\\", r"\\"), text)
        if not count:
            raise UsageError(f"docker/Dockerfile has no ARG {name}", "a cell sets it", "add it")
    said = " \\\n      ".join(f'{k}="{v}"' for k, v in labels(cell).items())
    return f"# Rendered by: ci/farm render {cell.name}\n{text}LABEL {said}\n"
