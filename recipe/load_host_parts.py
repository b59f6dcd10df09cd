"""Test inside the package: every host library that was shipped is whole, asks for no newer glibc than the package says,
and loads beside the installed apache-tvm-ffi; what they open at run time came with the package's dependencies."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path

import tvm_ffi

PREFIX = Path(os.environ.get("CONDA_PREFIX") or sys.prefix)


def declared_glibc() -> tuple[int, ...]:
    """The lowest glibc that the installed package asks for; nothing is asked on other systems."""
    (record,) = (PREFIX / "conda-meta").glob("deepspeed-ops-host-*.json")
    depends = json.loads(record.read_text(encoding="utf-8"))["depends"]
    floors = [d.split(">=")[1].split(",")[0] for d in depends if d.startswith("__glibc") and ">=" in d]
    return max((tuple(map(int, floor.split("."))) for floor in floors), default=())


def main() -> None:
    """Load them all."""
    manifests = sorted((PREFIX / "share" / "deepspeed-ops").glob("*/*/*.json"))
    loaded, declared = [], declared_glibc()
    for path in manifests:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["kind"] != "host":
            continue
        part = path.parent / manifest["filename"]
        assert hashlib.sha256(part.read_bytes()).hexdigest() == manifest["sha256"], f"{part} is not what was built"
        floor = tuple(manifest["glibc"] or ())
        assert not floor or declared >= floor, f"{part} needs glibc {floor}, the package says {declared}"
        tvm_ffi.load_module(str(part))
        loaded.append(manifest["op"])
    assert loaded, f"{PREFIX} holds no host library"
    if sys.platform == "linux":
        ctypes.CDLL(str(PREFIX / "lib" / "libaio.so.1"))  # async_io's; the system's own would hide that ours is missing
    print(f"{len(loaded)} host libraries load: {', '.join(loaded)}")


if __name__ == "__main__":
    main()
