"""DeepSpeed's module path of the compiled op: the functions that ``fused_adam``'s builder returns from ``load()``."""

from __future__ import annotations

import importlib
from typing import Any

from deepspeed_ops.op_builder.spec import get_spec

_SPEC = get_spec("fused_adam")


def __getattr__(name: str) -> Any:
    if name in _SPEC.functions:
        return getattr(importlib.import_module(_SPEC.face).module(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SPEC.functions})
