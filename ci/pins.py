"""What files written by hand must say because ``ci/matrix.toml`` or ``requirements/`` says it, and do not."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from op_builder import matrix

# Extras that DeepSpeed has, by the file that says what each is.
EXTRAS = {
    name: f"requirements-{name.replace('autotuning_ml', 'autotuning-ml')}.txt"
    for name in ("1bit", "1bit_mpi", "autotuning", "autotuning_ml", "dev", "inf", "readthedocs", "sd", "sparse_attn")
}


def requirements(file: str) -> list[str]:
    """The lines of a file in ``requirements/`` without comments."""
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def extras_differ() -> list[str]:
    """Where ``pyproject.toml`` and ``requirements/`` do not say the same."""
    project = matrix.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said, union = project["optional-dependencies"], set[str]()
    wrong = []
    for extra, file in EXTRAS.items():
        union |= set(requirements(file))
        if sorted(said.get(extra, [])) != sorted(requirements(file)):
            wrong.append(f"extra {extra} of pyproject.toml differs from requirements/{file}")
    if sorted(said.get("all", [])) != sorted(union):
        wrong.append("extra all of pyproject.toml is not the union of requirements/requirements-*.txt")
    if sorted(project["dependencies"]) != sorted(requirements("requirements.txt")):
        wrong.append("dependencies of pyproject.toml differ from requirements/requirements.txt")
    return wrong


def pins() -> list[str]:
    """What ``pyproject.toml`` and ``docker/Dockerfile`` must say because the matrix says it, and does not."""
    tables, text = matrix.load(), (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ffi = f'"{tables.ffi_package}>={tables.ffi_minimum},<{tables.ffi_below}"'
    wanted = {
        f'requires-python = ">={tables.pythons[0]}"': 1,
        f'"torch>={tables.torch_minimum}"': 1,
        ffi: 2,
        **{f'"Programming Language :: Python :: {python}"': 1 for python in tables.pythons},
    }
    lacking = [f"pyproject.toml lacks {line}" for line, times in wanted.items() if text.count(line) != times]
    base = f"ARG BASE={tables.image.base}\n"
    if (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").count(base) != 1:
        lacking.append(f"docker/Dockerfile lacks {base.strip()}")
    return [*lacking, *extras_differ()]
