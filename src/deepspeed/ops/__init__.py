"""The ops under DeepSpeed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed.ops import adagrad as adagrad
    from deepspeed.ops import adam as adam
    from deepspeed.ops import aio as aio
    from deepspeed.ops import gds as gds
    from deepspeed.ops import lamb as lamb
    from deepspeed.ops import lion as lion
    from deepspeed.ops import op_builder as op_builder
    from deepspeed.ops import pin_memory as pin_memory

_LATER = (
    "deepspeed.ops.adam, .adagrad, .aio, .gds, .lamb, .lion and .pin_memory are here; "
    "the ops built so far: ds_report (or docs/ops.md)"
)
_ABSENT = dict.fromkeys(
    (
        *("sparse_attention", "transformer", "fp_quantizer"),
        *("quantizer", "random_ltd", "compile", "deepspeed4science", "triton_ops"),
        *("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"),
    ),
    _LATER,
)

__all__ = ["adagrad", "adam", "aio", "gds", "lamb", "lion", "op_builder", "pin_memory"]
__getattr__, __dir__ = reexport(
    __name__,
    {
        "adagrad": "deepspeed.ops.adagrad",
        "adam": "deepspeed.ops.adam",
        "aio": "deepspeed.ops.aio",
        "gds": "deepspeed.ops.gds",
        "lamb": "deepspeed.ops.lamb",
        "lion": "deepspeed.ops.lion",
        "op_builder": "deepspeed.ops.op_builder",
        "pin_memory": "deepspeed.ops.pin_memory",
        "__compatible_ops__": "deepspeed_ops.git_version_info:compatible_ops",
    },
    _ABSENT,
)
