"""The builders under DeepSpeed's names: ``CPUAdamBuilder().load()``, ``.is_compatible()``, ``ALL_OPS``, ..."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def _modules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__)}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what doctest and inspect ask for must not load the builders
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _modules():
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module("deepspeed_ops.op_builder.builders"), name)


def __dir__() -> list[str]:
    builders = importlib.import_module("deepspeed_ops.op_builder.builders")
    return sorted({*_modules(), *getattr(builders, "__all__", ())})
