"""The ops under DeepSpeed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed.ops import adagrad as adagrad
    from deepspeed.ops import adam as adam
    from deepspeed.ops import lamb as lamb
    from deepspeed.ops import lion as lion
    from deepspeed.ops import op_builder as op_builder

_LATER = "deepspeed.ops.adam, .adagrad, .lamb and .lion are here; the ops built so far: ds_report (or docs/ops.md)"
_ABSENT = dict.fromkeys(
    (
        *("sparse_attention", "transformer", "fp_quantizer", "aio", "gds", "pin_memory"),
        *("quantizer", "random_ltd", "compile", "deepspeed4science", "triton_ops"),
        *("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"),
    ),
    _LATER,
)

__all__ = ["adagrad", "adam", "lamb", "lion", "op_builder"]
__getattr__, __dir__ = reexport(
    __name__,
    {
        "adagrad": "deepspeed.ops.adagrad",
        "adam": "deepspeed.ops.adam",
        "lamb": "deepspeed.ops.lamb",
        "lion": "deepspeed.ops.lion",
        "op_builder": "deepspeed.ops.op_builder",
        "__compatible_ops__": "deepspeed_ops.git_version_info:compatible_ops",
    },
    _ABSENT,
)
