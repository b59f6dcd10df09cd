"""Spec of ``async_io``."""

SPEC: dict[str, object] = {
    "name": "async_io",
    "summary": "Asynchronous reads and writes between files and tensors, with direct I/O",
    "env_var": "DS_BUILD_AIO",
    "builder": "AsyncIOBuilder",
    "absolute_name": "deepspeed.ops.aio.async_io_op",
    "face": "deepspeed_ops.async_io",
    "functions": ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"],
    "schemas": {},
    "host": ["async_io/async_io.cpp"],
    "device": [],
    "kernels": [],
    "simd": {},
    "min_sm": None,
    "needs": ["libaio"],
    "dtypes": ["every"],
    "layout": "contiguous; any size, offset and alignment; pinned, pageable or GPU memory",
    "formula": "copies, no arithmetic; Linux io_uring or kernel AIO on O_DIRECT, else threads of pread and pwrite",
    "deterministic": True,
    "since": "0.1.0",
}
