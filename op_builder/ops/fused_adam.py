"""Spec of ``fused_adam``."""

SPEC = {
    "name": "fused_adam",
    "summary": "Adam and AdamW on many GPU tensors in one launch",
    "env_var": "DS_BUILD_FUSED_ADAM",
    "builder": "FusedAdamBuilder",
    "absolute_name": "deepspeed.ops.adam.fused_adam_op",
    "face": "deepspeed_ops.fused_adam",
    "functions": ["multi_tensor_adam", "multi_tensor_check_finite"],
    "schemas": {
        "fused_adam_": "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] steps, "
        "Tensor? lr_tensor, float lr, float beta1, float beta2, float eps, float weight_decay, bool adamw, "
        "bool bias_correction, Tensor? noop_flag, Tensor? grad_scale, Tensor? found_inf) -> ()",
    },
    "host": ["fused_adam/fused_adam.cpp"],
    "device": ["fused_adam/fused_adam.cu"],
    "kernels": [
        "fused_adam_f32",
        "fused_adam_mixed",
        "fused_adam_f64",
        "fused_adam_prepare_f32",
        "fused_adam_prepare_f64",
        "check_finite",
    ],
    "simd": {},
    "min_sm": [6, 0],
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16", "float64"],
    "layout": "contiguous or channels_last; a gradient may have other strides than its parameter",
    "formula": "Kingma & Ba 2015 (Adam), algorithm 1; Loshchilov & Hutter 2019 (AdamW), algorithm 2",
    "deterministic": True,
    "since": "0.1.0",
}
