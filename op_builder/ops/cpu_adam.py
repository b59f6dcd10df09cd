"""Spec of ``cpu_adam``."""

SPEC = {
    "name": "cpu_adam",
    "summary": "Adam and AdamW on CPU tensors",
    "env_var": "DS_BUILD_CPU_ADAM",
    "builder": "CPUAdamBuilder",
    "absolute_name": "deepspeed.ops.adam.cpu_adam_op",
    "face": "deepspeed_ops.cpu_adam",
    "functions": ["create_adam", "adam_update", "adam_update_copy", "adam_rollback", "destroy_adam"],
    "schemas": {
        "cpu_adam_": "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] steps, float lr, "
        "float beta1, float beta2, float eps, float weight_decay, bool adamw, bool bias_correction) -> ()",
    },
    "host": ["cpu_adam/cpu_adam.cpp", "cpu_adam/cpu_adam_levels.cpp"],
    "device": [],
    "kernels": [],
    "simd": {"x86_64": ["avx512", "avx2", "scalar"], "aarch64": ["neon", "scalar"]},
    "min_sm": None,
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16"],
    "layout": "contiguous or channels_last; a gradient may have other strides than its parameter",
    "formula": "Kingma & Ba 2015 (Adam), algorithm 1; Loshchilov & Hutter 2019 (AdamW), algorithm 2",
    "deterministic": True,
    "since": "0.1.0",
}
