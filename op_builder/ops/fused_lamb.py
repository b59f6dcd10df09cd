"""Spec of ``fused_lamb``."""

SPEC = {
    "name": "fused_lamb",
    "summary": "LAMB on many GPU tensors in two passes over memory",
    "env_var": "DS_BUILD_FUSED_LAMB",
    "builder": "FusedLambBuilder",
    "absolute_name": "deepspeed.ops.lamb.fused_lamb_op",
    "face": "deepspeed_ops.fused_lamb",
    "functions": ["lamb"],
    "schemas": {
        "fused_lamb_": "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] steps, Tensor? "
        "lr_tensor, float lr, float beta1, float beta2, float eps, float weight_decay, float max_coeff, "
        "float min_coeff, bool eps_inside_sqrt, bool bias_correction, Tensor? noop_flag, Tensor? "
        "grad_scale, Tensor? found_inf) -> Tensor",
    },
    "host": ["fused_lamb/fused_lamb.cpp"],
    "device": ["fused_lamb/fused_lamb.cu"],
    "kernels": [
        "fused_lamb_first_f32",
        "fused_lamb_first_mixed",
        "fused_lamb_first_f64",
        "fused_lamb_reduce",
        "fused_lamb_ratio_f32",
        "fused_lamb_ratio_f64",
        "fused_lamb_second_f32",
        "fused_lamb_second_mixed",
        "fused_lamb_second_f64",
        "fused_lamb_prepare_f32",
        "fused_lamb_prepare_f64",
    ],
    "simd": {},
    "min_sm": [6, 0],
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16", "float64"],
    "layout": "contiguous or channels_last; a gradient may have other strides than its parameter",
    "formula": "You et al. 2020 (LAMB), algorithm 2; bias correction in the step size, trust ratio clamped",
    "deterministic": True,
    "since": "0.1.0",
}
