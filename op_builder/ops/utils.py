"""Spec of ``utils``."""

SPEC = {
    "name": "utils",
    "summary": "Many tensors as one flat tensor and back; a tensor as bytes",
    "env_var": "DS_BUILD_UTILS",
    "builder": "UtilsBuilder",
    "absolute_name": "deepspeed.ops.utils_op",
    "face": "deepspeed_ops.flatten",
    "functions": ["flatten", "unflatten", "cast_to_byte_tensor"],
    "schemas": {"flatten": "(Tensor[] tensors) -> Tensor"},
    "host": [],
    "device": [],
    "kernels": [],
    "simd": {},
    "min_sm": None,
    "needs": [],
    "dtypes": ["every"],
    "layout": "any for flatten; contiguous for cast_to_byte_tensor",
    "formula": "copies and views, no arithmetic",
    "deterministic": True,
    "since": "0.1.0",
}
