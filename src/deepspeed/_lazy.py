"""Names that arrive at first use (PEP 562), so that importing a face module imports nothing behind it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def reexport(
    module: str, sources: Mapping[str, str], absent: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the face module ``module``.

    Args:
        module: the face module's ``__name__``.
        sources: name -> where it lives, ``"package.module:attribute"`` or ``"package.module"`` (the module itself).
        absent: names that belong to DeepSpeed and are not here -> what to use instead.
    """
    absent = absent or {}

    def __getattr__(name: str) -> Any:
        if name in sources:
            source, _, attribute = sources[name].partition(":")
            value: Any = importlib.import_module(source)
            value = getattr(value, attribute) if attribute else value
            setattr(sys.modules[module], name, value)
            return value
        if name in absent:
            from deepspeed_ops.op_builder.errors import NotHere

            raise NotHere(
                f"{module}.{name} is not in this distribution",
                "it holds DeepSpeed's compiled ops (deepspeed.ops.adam, deepspeed.ops.op_builder, ds_report), "
                "not its engine",
                absent[name],
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *sources})

    return __getattr__, __dir__


def op_functions(module: str, op: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the face module of a compiled op: the functions of its builder's ``load()``.

    Args:
        module: the face module's ``__name__``.
        op: the op's name.
    """

    def spec() -> Any:
        return importlib.import_module("deepspeed_ops.op_builder.spec").get_spec(op)

    def __getattr__(name: str) -> Any:
        if not name.startswith("__") and name in spec().functions:
            return getattr(importlib.import_module(spec().face).module(), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *spec().functions})

    return __getattr__, __dir__
