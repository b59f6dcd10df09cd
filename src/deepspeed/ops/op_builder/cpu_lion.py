"""DeepSpeed's module path of ``CPULionBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    CPULionBuilder: type[OpBuilder]

__all__ = ["CPULionBuilder"]
__getattr__, __dir__ = reexport(__name__, {"CPULionBuilder": "deepspeed_ops.op_builder.builders:CPULionBuilder"})
