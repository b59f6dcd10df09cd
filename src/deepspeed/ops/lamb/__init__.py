"""``FusedLamb``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.lamb import FusedLamb as FusedLamb

__all__ = ["FusedLamb"]
__getattr__, __dir__ = reexport(__name__, {"FusedLamb": "deepspeed_ops.lamb:FusedLamb"})
