"""DeepSpeed's module path of ``CPUAdamBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    CPUAdamBuilder: type[OpBuilder]

__all__ = ["CPUAdamBuilder"]
__getattr__, __dir__ = reexport(__name__, {"CPUAdamBuilder": "deepspeed_ops.op_builder.builders:CPUAdamBuilder"})
