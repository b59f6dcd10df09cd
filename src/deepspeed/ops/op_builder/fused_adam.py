"""DeepSpeed's module path of ``FusedAdamBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    FusedAdamBuilder: type[OpBuilder]

__all__ = ["FusedAdamBuilder"]
__getattr__, __dir__ = reexport(__name__, {"FusedAdamBuilder": "deepspeed_ops.op_builder.builders:FusedAdamBuilder"})
