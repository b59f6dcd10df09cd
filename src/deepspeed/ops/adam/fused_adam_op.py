"""DeepSpeed's module path of the compiled op: the functions that ``fused_adam``'s builder returns from ``load()``."""

from __future__ import annotations

from deepspeed_ops.op_builder.spec import get_spec

from deepspeed._lazy import reexport

_SPEC = get_spec("fused_adam")
__getattr__, __dir__ = reexport(__name__, {name: f"{_SPEC.face}:{name}" for name in _SPEC.functions})
