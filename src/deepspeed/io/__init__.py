"""State dictionaries on a fast disk: ``TensorStore``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.tensor_store import Saved as Saved
    from deepspeed_ops.tensor_store import Saving as Saving
    from deepspeed_ops.tensor_store import TensorStore as TensorStore

__all__ = ["Saved", "Saving", "TensorStore"]
__getattr__, __dir__ = reexport(__name__, {name: f"deepspeed_ops.tensor_store:{name}" for name in __all__})
