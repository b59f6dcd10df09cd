"""Decide and build: what parts an op has, which one fits this machine, and how to make one where none does.

Knows no torch. Importing it runs no compiler, looks at no device and prints nothing; names load on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

#: The checkout, or the installed ``deepspeed_ops`` folder: both hold ``csrc``, ``ci/matrix.toml`` and maybe ``parts``.
HOME = Path(__file__).resolve().parent.parent

_BUILDER_NAMES = (
    "ALL_BUILDERS",
    "ALL_OPS",
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "TorchCPUOpBuilder",
    "builder_closure",
    "get_default_compute_capabilities",
    "installed_cuda_version",
)


def __getattr__(name: str) -> Any:
    # A builder class exists for every spec, so the names cannot be listed here: ask the facade.
    if name in _BUILDER_NAMES or name.endswith("Builder"):
        return getattr(importlib.import_module(".builders", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_BUILDER_NAMES, *importlib.import_module(".builders", __name__).__all__})
