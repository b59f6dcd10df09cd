"""Spec of ``gds``."""

SPEC: dict[str, object] = {
    "name": "gds",
    "summary": "Reads and writes between files and GPU memory through cuFile, or through pinned memory without it",
    "env_var": "DS_BUILD_GDS",
    "builder": "GDSBuilder",
    "absolute_name": "deepspeed.ops.gds.gds_op",
    "face": "deepspeed_ops.gds",
    "functions": ["gds_handle"],
    "schemas": {},
    "host": ["gds/gds.cpp"],
    "device": [],
    "kernels": [],
    "simd": {},
    "min_sm": None,
    "needs": ["cufile"],
    "dtypes": ["every"],
    "layout": "contiguous; any size, offset and alignment; GPU, pinned or pageable memory",
    "formula": "copies, no arithmetic; cuFileRead and cuFileWrite, else a bounce through pinned memory",
    "deterministic": True,
    "since": "0.1.0",
}
