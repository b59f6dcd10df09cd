"""``DeepSpeedCPUAdagrad``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.adagrad import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
__getattr__, __dir__ = reexport(__name__, {"DeepSpeedCPUAdagrad": "deepspeed_ops.adagrad:DeepSpeedCPUAdagrad"})
