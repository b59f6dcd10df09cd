"""Spec of ``fused_lion``."""

SPEC = {
    "name": "fused_lion",
    "summary": "Lion on many GPU tensors in one launch",
    "env_var": "DS_BUILD_FUSED_LION",
    "builder": "FusedLionBuilder",
    "absolute_name": "deepspeed.ops.lion.fused_lion_op",
    "face": "deepspeed_ops.fused_lion",
    "functions": ["multi_tensor_lion"],
    "schemas": {
        "fused_lion_": "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] steps, Tensor? lr_tensor, float lr, "
        "float beta1, float beta2, float weight_decay, Tensor? noop_flag, Tensor? grad_scale, Tensor? "
        "found_inf) -> ()",
    },
    "host": ["fused_lion/fused_lion.cpp"],
    "device": ["fused_lion/fused_lion.cu"],
    "kernels": ["fused_lion_f32", "fused_lion_mixed", "fused_lion_f64", "fused_lion_prepare"],
    "simd": {},
    "min_sm": [6, 0],
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16", "float64"],
    "layout": "contiguous or channels_last; a gradient may have other strides than its parameter",
    "formula": "Chen et al. 2023 (Lion), algorithm 2; sign(0) = 0",
    "deterministic": True,
    "since": "0.1.0",
}
