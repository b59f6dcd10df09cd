"""DeepSpeed's module path of the compiled op: the functions that ``pin_memory``'s builder returns from ``load()``."""

from __future__ import annotations

from deepspeed._lazy import op_functions

__getattr__, __dir__ = op_functions(__name__, "pin_memory")
