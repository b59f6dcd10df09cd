"""``FusedAdam`` (GPU and CPU tensors) and ``DeepSpeedCPUAdam``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
    from deepspeed_ops.adam import FusedAdam as FusedAdam

_ABSENT = dict.fromkeys(
    ("ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"),
    "ZenFlow belongs to DeepSpeed's engine; FusedAdam and DeepSpeedCPUAdam are here",
)

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__getattr__, __dir__ = reexport(__name__, {name: f"deepspeed_ops.adam:{name}" for name in __all__}, _ABSENT)
