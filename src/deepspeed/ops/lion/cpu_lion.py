"""DeepSpeed's module path of ``DeepSpeedCPULion``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.lion import DeepSpeedCPULion as DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
__getattr__, __dir__ = reexport(__name__, {"DeepSpeedCPULion": "deepspeed_ops.lion:DeepSpeedCPULion"})
