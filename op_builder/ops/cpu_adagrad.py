"""Spec of ``cpu_adagrad``."""

SPEC = {
    "name": "cpu_adagrad",
    "summary": "Adagrad on CPU tensors, with dense and sparse gradients",
    "env_var": "DS_BUILD_CPU_ADAGRAD",
    "builder": "CPUAdagradBuilder",
    "absolute_name": "deepspeed.ops.adagrad.cpu_adagrad_op",
    "face": "deepspeed_ops.cpu_adagrad",
    "functions": ["create_adagrad", "adagrad_update", "destroy_adagrad"],
    "schemas": {
        "cpu_adagrad_": "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] v, Tensor(c!)[] steps, float lr, float eps, float "
        "weight_decay) -> ()",
    },
    "host": ["cpu_adagrad/cpu_adagrad.cpp", "cpu_adagrad/cpu_adagrad_levels.cpp"],
    "device": [],
    "kernels": [],
    "simd": {"x86_64": ["avx512", "avx2", "scalar"], "aarch64": ["neon", "scalar"]},
    "min_sm": None,
    "needs": [],
    "dtypes": ["float32", "float16", "bfloat16"],
    "layout": "contiguous or channels_last; a gradient may have other strides than its parameter",
    "formula": "Duchi et al. 2011 (Adagrad), diagonal case; weight decay is added to the gradient (L2)",
    "deterministic": True,
    "since": "0.1.0",
}
