"""DeepSpeed's module path of ``FusedLambBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    FusedLambBuilder: type[OpBuilder]

__all__ = ["FusedLambBuilder"]
__getattr__, __dir__ = reexport(__name__, {"FusedLambBuilder": "deepspeed_ops.op_builder.builders:FusedLambBuilder"})
