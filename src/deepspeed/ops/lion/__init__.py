"""``FusedLion`` (GPU and CPU tensors) and ``DeepSpeedCPULion``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.lion import DeepSpeedCPULion as DeepSpeedCPULion
    from deepspeed_ops.lion import FusedLion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
__getattr__, __dir__ = reexport(
    __name__, {"DeepSpeedCPULion": "deepspeed_ops.lion:DeepSpeedCPULion", "FusedLion": "deepspeed_ops.lion:FusedLion"}
)
