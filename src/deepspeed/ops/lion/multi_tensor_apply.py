"""DeepSpeed's module path of ``MultiTensorApply``."""

from __future__ import annotations

from deepspeed_ops.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply"]
