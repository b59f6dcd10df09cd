"""Spec of ``pin_memory``."""

SPEC: dict[str, object] = {
    "name": "pin_memory",
    "summary": "Page-aligned tensors whose memory is locked",
    "env_var": "DS_BUILD_PIN_MEMORY",
    "builder": "PinMemoryBuilder",
    "absolute_name": "deepspeed.ops.pin_memory.pin_memory_op",
    "face": "deepspeed_ops.pin_memory",
    "functions": ["pin_handle"],
    "schemas": {},
    "host": ["pin_memory/pin_memory.cpp"],
    "device": [],
    "kernels": [],
    "simd": {},
    "min_sm": None,
    "needs": [],
    "dtypes": ["every"],
    "layout": "one dimension, contiguous, begins at a page",
    "formula": "allocation, no arithmetic: mmap and mlock, or VirtualAlloc and VirtualLock",
    "deterministic": True,
    "since": "0.1.0",
}
