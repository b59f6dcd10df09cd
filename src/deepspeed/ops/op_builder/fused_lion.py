"""DeepSpeed's module path of ``FusedLionBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    FusedLionBuilder: type[OpBuilder]

__all__ = ["FusedLionBuilder"]
__getattr__, __dir__ = reexport(__name__, {"FusedLionBuilder": "deepspeed_ops.op_builder.builders:FusedLionBuilder"})
