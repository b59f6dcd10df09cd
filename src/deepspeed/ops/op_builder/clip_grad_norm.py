"""DeepSpeed's module path of ``ClipGradNormBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    ClipGradNormBuilder: type[OpBuilder]

__all__ = ["ClipGradNormBuilder"]
__getattr__, __dir__ = reexport(
    __name__, {"ClipGradNormBuilder": "deepspeed_ops.op_builder.builders:ClipGradNormBuilder"}
)
