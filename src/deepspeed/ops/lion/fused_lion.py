"""DeepSpeed's module path of ``FusedLion``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.lion import FusedLion as FusedLion

__all__ = ["FusedLion"]
__getattr__, __dir__ = reexport(__name__, {"FusedLion": "deepspeed_ops.lion:FusedLion"})
