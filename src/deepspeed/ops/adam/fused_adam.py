"""DeepSpeed's module path of ``FusedAdam``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.adam import FusedAdam as FusedAdam

__all__ = ["FusedAdam"]
__getattr__, __dir__ = reexport(__name__, {"FusedAdam": "deepspeed_ops.adam:FusedAdam"})
