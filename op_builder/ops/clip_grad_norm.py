"""Spec of ``clip_grad_norm``."""

SPEC = {
    "name": "clip_grad_norm",
    "summary": "Global L2 norm of many GPU tensors, and their scaling to at most a given norm",
    "env_var": "DS_BUILD_CLIP_GRAD_NORM",
    "builder": "ClipGradNormBuilder",
    "absolute_name": "deepspeed.ops.clip_grad_norm_op",
    "face": "deepspeed_ops.clip_grad_norm",
    "functions": ["global_norm", "clip_grad_norm_"],
    "schemas": {
        "clip_grad_norm_": "(Tensor(a!)[] g, float max_norm) -> Tensor",
    },
    "host": ["clip_grad_norm/clip_grad_norm.cpp"],
    "device": ["clip_grad_norm/clip_grad_norm.cu"],
    "kernels": [
        "squares_f32",
        "squares_mixed",
        "squares_f64",
        "reduce_squares",
        "norm_and_factor",
        "scale_f32",
        "scale_mixed",
        "scale_f64",
    ],
    "simd": {},
    "min_sm": [6, 0],
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16", "float64"],
    "layout": "contiguous or channels_last",
    "formula": "Pascanu et al. 2013, algorithm 1: g = g * min(1, max_norm / (norm + 1e-6))",
    "deterministic": True,
    "since": "0.1.0",
}
