"""Spec of ``cpu_lion``."""

SPEC = {
    "name": "cpu_lion",
    "summary": "Lion on CPU tensors",
    "env_var": "DS_BUILD_CPU_LION",
    "builder": "CPULionBuilder",
    "absolute_name": "deepspeed.ops.lion.cpu_lion_op",
    "face": "deepspeed_ops.cpu_lion",
    "functions": ["create_lion", "lion_update", "destroy_lion"],
    "schemas": {
        "cpu_lion_": "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] steps, float lr, float beta1, float "
        "beta2, float weight_decay) -> ()",
    },
    "host": ["cpu_lion/cpu_lion.cpp", "cpu_lion/cpu_lion_levels.cpp"],
    "device": [],
    "kernels": [],
    "simd": {"x86_64": ["avx512", "avx2", "scalar"], "aarch64": ["neon", "scalar"]},
    "min_sm": None,
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16"],
    "layout": "contiguous or channels_last; a gradient may have other strides than its parameter",
    "formula": "Chen et al. 2023 (Lion), algorithm 2; sign(0) = 0",
    "deterministic": True,
    "since": "0.1.0",
}
