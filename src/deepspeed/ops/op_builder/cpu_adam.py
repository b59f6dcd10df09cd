"""DeepSpeed's module path of ``CPUAdamBuilder``."""

from __future__ import annotations

from deepspeed._lazy import reexport

__all__ = ["CPUAdamBuilder"]
__getattr__, __dir__ = reexport(__name__, {"CPUAdamBuilder": "deepspeed_ops.op_builder.builders:CPUAdamBuilder"})
