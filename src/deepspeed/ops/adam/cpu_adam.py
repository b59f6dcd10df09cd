"""DeepSpeed's module path of ``DeepSpeedCPUAdam``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
__getattr__, __dir__ = reexport(__name__, {"DeepSpeedCPUAdam": "deepspeed_ops.adam:DeepSpeedCPUAdam"})
