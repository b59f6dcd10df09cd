"""DeepSpeed's module path of ``PinMemoryBuilder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import OpBuilder

    PinMemoryBuilder: type[OpBuilder]

__all__ = ["PinMemoryBuilder"]
__getattr__, __dir__ = reexport(__name__, {"PinMemoryBuilder": "deepspeed_ops.op_builder.builders:PinMemoryBuilder"})
