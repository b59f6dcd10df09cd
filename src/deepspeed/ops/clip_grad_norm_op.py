"""DeepSpeed's module path of the compiled op: the functions of ``clip_grad_norm``."""

from __future__ import annotations

from deepspeed._lazy import op_functions

__getattr__, __dir__ = op_functions(__name__, "clip_grad_norm")
