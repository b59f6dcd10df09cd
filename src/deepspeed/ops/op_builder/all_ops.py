"""DeepSpeed's module path of ``ALL_OPS``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.builders import ALL_OPS as ALL_OPS

    from deepspeed_ops.git_version_info import accelerator_name as accelerator_name

__all__ = ["ALL_OPS", "accelerator_name"]
__getattr__, __dir__ = reexport(
    __name__,
    {
        "ALL_OPS": "deepspeed_ops.op_builder.builders:ALL_OPS",
        "accelerator_name": "deepspeed_ops.git_version_info:accelerator_name",
    },
)
