"""DeepSpeed's module path of ``UtilsBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    UtilsBuilder: type[OpBuilder]

__all__ = ["UtilsBuilder"]
__getattr__, __dir__ = reexport(__name__, {"UtilsBuilder": "deepspeed_ops.op_builder.builders:UtilsBuilder"})
