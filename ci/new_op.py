"""``make op NAME=x``: the skeleton of a new op, four files and no shared one, with a failing test.

The files are a spec, a host source that compiles and refuses, the torch-facing module, and the test. GPU code is added
by writing ``csrc/<name>/<name>.cu`` and naming it under ``device`` in the spec.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SPEC = '''"""Spec of ``{name}``."""

SPEC = {{
    "name": "{name}",
    "summary": "one line for tables",
    "env_var": "DS_BUILD_{upper}",
    "builder": "{camel}Builder",
    "absolute_name": "deepspeed.ops.{name}_op",
    "face": "deepspeed_ops.{name}",
    "functions": ["{name}"],
    "schemas": {{"{name}_": "(Tensor(a!) p) -> ()"}},
    "host": ["{name}/{name}.cpp"],
    "device": [],
    "kernels": [],
    "simd": {{}},
    "min_sm": None,
    "needs": [],
    "dtypes": ["float32"],
    "layout": "dense, contiguous",
    "formula": "paper, equation",
    "deterministic": True,
    "since": "{version}",
}}
'''

SOURCE = """// {name}: one line.
//
// Formula: and its source.
// p float32 [n], contiguous, 4-byte aligned: changed in place. Accumulates in float32, rounds to nearest even.
// Errors: ValueError where p is not contiguous; TypeError where it is not float32.
#include <tvm/ffi/tvm_ffi.h>

namespace ds {{
namespace {{

void {name}(tvm::ffi::TensorView p) {{
  if (!p.IsContiguous()) TVM_FFI_THROW(ValueError) << "{name}: p is not contiguous";
  TVM_FFI_THROW(RuntimeError) << "{name}: the arithmetic of csrc/{name}/{name}.cpp is still to be written";
}}

}}  // namespace
}}  // namespace ds

TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ds::{name})
"""

FACE = '''"""``{name}`` on torch tensors."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from deepspeed_ops.op_builder import loader

if TYPE_CHECKING:
    import torch

__all__ = ["module", "{name}"]


def module() -> ModuleType:
    """What ``{camel}Builder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module("{name}")
    return sys.modules[__name__]


def {name}(p: torch.Tensor) -> None:
    """One sentence.

    Args:
        p: float32 [n], contiguous; changed in place.
    """
    loader.host_module("{name}")["{name}"](p)
'''

TEST = '''"""{name}: elementwise against the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from op_builder import loader


def reference(p: np.ndarray) -> np.ndarray:
    """The formula, in float64, importing nothing of ours."""
    return p


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1023, 100_003])
def test_equals_the_formula(n: int) -> None:
    """Fault: wrong arithmetic, or a tail that is not written."""
    p = np.linspace(0, 1, n, dtype=np.float32)
    wanted = reference(p.astype(np.float64))
    loader.host_module("{name}")["{name}"](p)
    np.testing.assert_allclose(p, wanted, rtol=2 * np.finfo(np.float32).eps)
'''


def files(name: str) -> dict[str, str]:
    """Path -> text of the skeleton."""
    version = (ROOT / "version.txt").read_text(encoding="utf-8").strip()
    camel = "".join("CPU" if word == "cpu" else word.capitalize() for word in name.split("_"))
    names = {"name": name, "upper": name.upper(), "camel": camel, "version": version}
    templates = {
        f"op_builder/ops/{name}.py": SPEC,
        f"csrc/{name}/{name}.cpp": SOURCE,
        f"src/deepspeed_ops/{name}.py": FACE,
        f"tests/ops/test_{name}.py": TEST,
    }
    return {path: template.format(**names) for path, template in templates.items()}


def main(arguments: list[str]) -> int:
    """Write the skeleton; refuses to overwrite."""
    name = arguments[0] if len(arguments) == 1 else ""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        sys.stderr.write(
            f"{name!r} is no name for an op\n  why: expected lower_case words\n  fix: make op NAME=fused_lamb\n"
        )
        return 2
    wanted = files(name)
    there = [path for path in wanted if (ROOT / path).exists()]
    if there:
        sys.stderr.write(f"op {name} is there already: {', '.join(there)}\n  fix: choose another NAME\n")
        return 2
    for path, text in wanted.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8", newline="\n")
        sys.stdout.write(f"wrote {path}\n")
    sys.stdout.write(f"next: pytest tests/ops/test_{name}.py fails until the arithmetic is written; then make gen\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
