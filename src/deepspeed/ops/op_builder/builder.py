"""DeepSpeed's module path of the builder base classes and their functions."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("deepspeed_ops.op_builder.builders"), name)
