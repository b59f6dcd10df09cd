"""DeepSpeed's module path of ``FusedAdamBuilder``."""

from __future__ import annotations

from deepspeed._lazy import reexport

__all__ = ["FusedAdamBuilder"]
__getattr__, __dir__ = reexport(__name__, {"FusedAdamBuilder": "deepspeed_ops.op_builder.builders:FusedAdamBuilder"})
