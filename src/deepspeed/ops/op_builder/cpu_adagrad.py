"""DeepSpeed's module path of ``CPUAdagradBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    CPUAdagradBuilder: type[OpBuilder]

__all__ = ["CPUAdagradBuilder"]
__getattr__, __dir__ = reexport(__name__, {"CPUAdagradBuilder": "deepspeed_ops.op_builder.builders:CPUAdagradBuilder"})
