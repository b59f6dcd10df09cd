"""DeepSpeed's package of ``AsyncIOBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    AsyncIOBuilder: type[OpBuilder]

__all__ = ["AsyncIOBuilder"]
__getattr__, __dir__ = reexport(__name__, {"AsyncIOBuilder": "deepspeed_ops.op_builder.builders:AsyncIOBuilder"})
