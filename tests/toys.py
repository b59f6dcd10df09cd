"""Toy ops for the tests of the builder's rooms: small sources in a private home, parts of made-up content."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from op_builder.manifest import Manifest
from op_builder.spec import OpSpec, from_literal
from op_builder.store import Part, Store

# TVM-FFI's C header alone: such a library compiles in a fraction of a second.
HOST_SOURCE = """
#include <tvm/ffi/c_api.h>
#include "toy/answer.h"
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_answer(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = TOY_ANSWER;
  return 0;
}
"""
DEVICE_SOURCE = """
#include "toy/scale.cuh"
extern "C" __global__ void toy_scale(float* x, float by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = scaled(x[i], by);
}
"""


def toy_spec(name: str = "toy", **changes: Any) -> OpSpec:
    """A spec of a host-only op; give ``device`` to add GPU code."""
    literal: dict[str, Any] = {
        "name": name,
        "summary": "answers",
        "env_var": f"DS_BUILD_{name.upper()}",
        "builder": f"{name.title()}Builder",
        "absolute_name": f"deepspeed.ops.{name}_op",
        "face": "json",
        "functions": ["answer"],
        "schemas": {},
        "host": [f"{name}/{name}.cpp"],
        "device": [],
        "kernels": [],
        "simd": {},
        "min_sm": None,
        "needs": [],
        "dtypes": [],
        "layout": "",
        "formula": "",
        "deterministic": True,
        "since": "0.1.0",
    }
    return from_literal({**literal, **changes})


def toy_home(root: Path, answer: int = 42) -> Path:
    """A home with the sources of op ``toy``: host library and GPU code."""
    folder = root / "csrc" / "toy"
    folder.mkdir(parents=True)
    (folder / "toy.cpp").write_text(HOST_SOURCE, encoding="utf-8")
    (folder / "answer.h").write_text(f"#define TOY_ANSWER {answer}\n", encoding="utf-8")
    (folder / "toy.cu").write_text(DEVICE_SOURCE, encoding="utf-8")
    scaled = "__device__ __forceinline__ float scaled(float x, float by) { return x * by; }\n"
    (folder / "scale.cuh").write_text(scaled, encoding="utf-8")
    (root / "version.txt").write_text("1.2.3\n", encoding="utf-8")
    return root


def host_manifest(**changes: Any) -> Manifest:
    """A manifest of a host part of ``toy``."""
    base = Manifest(
        op="toy",
        variant="linux-x86_64",
        kind="host",
        filename="toy.linux-x86_64.so",
        key="k" * 64,
        source_digest="s" * 64,
        compiler="g++ 12.2.0",
        abi="tvm-ffi 0.1",
        platform="linux-x86_64",
        glibc=(2, 17),
        needed=("libtvm_ffi.so", "libc.so.6"),
        created_by="1.2.3",
    )
    return dataclasses.replace(base, **changes)


def device_manifest(variant: str = "sm90", release: tuple[int, int] = (12, 1), **changes: Any) -> Manifest:
    """A manifest of a GPU part of ``toy``."""
    ptx = variant.startswith("ptx")
    base = Manifest(
        op="toy",
        variant=variant,
        kind="device",
        filename=f"toy.{variant}.{'ptx' if ptx else 'cubin'}",
        key=f"{variant}-{release}",
        source_digest="s" * 64,
        compiler=f"nvrtc {release[0]}.{release[1]}",
        compiler_release=release,
        ptx_isa=(8, 1) if ptx else None,
        kernels=("toy_scale",),
        sha256=f"{variant}{release}",
        created_by="1.2.3",
    )
    return dataclasses.replace(base, **changes)


def fake_part(manifest: Manifest, origin: str = "package") -> Part:
    """A part that exists on paper only."""
    return Part(Path("/parts", origin, manifest.op, manifest.key, manifest.filename), manifest, origin)


def put(store: Store, manifest: Manifest, content: bytes = b"content of a part") -> Part:
    """Publish a part of arbitrary content."""
    with store.workshop() as shop:
        (shop.part / manifest.filename).write_bytes(content)
        return store.publish(shop, manifest.filename, manifest)
