"""DeepSpeed's package of ``GDSBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    GDSBuilder: type[OpBuilder]

__all__ = ["GDSBuilder"]
__getattr__, __dir__ = reexport(__name__, {"GDSBuilder": "deepspeed_ops.op_builder.builders:GDSBuilder"})
