"""DeepSpeed's accelerator handle, as far as the ops layer needs it (``cuda`` and ``cpu``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.accelerator import Accelerator as Accelerator
    from deepspeed_ops.accelerator import get_accelerator as get_accelerator
    from deepspeed_ops.accelerator import is_current_accelerator_supported as is_current_accelerator_supported
    from deepspeed_ops.accelerator import set_accelerator as set_accelerator

__all__ = ["Accelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
__getattr__, __dir__ = reexport(__name__, {name: f"deepspeed_ops.accelerator:{name}" for name in __all__})
