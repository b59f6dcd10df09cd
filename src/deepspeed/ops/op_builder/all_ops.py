"""DeepSpeed's module path of ``ALL_OPS``."""

from __future__ import annotations

from deepspeed._lazy import reexport

__all__ = ["ALL_OPS", "accelerator_name"]
__getattr__, __dir__ = reexport(
    __name__,
    {
        "ALL_OPS": "deepspeed_ops.op_builder.builders:ALL_OPS",
        "accelerator_name": "deepspeed_ops.git_version_info:accelerator_name",
    },
)
