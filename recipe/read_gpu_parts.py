"""Test inside the package: every GPU part that was shipped is whole and is for the architecture that its name says."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

PREFIX = Path(os.environ.get("CONDA_PREFIX") or sys.prefix)


def main() -> None:
    """Read them all."""
    seen = []
    for path in sorted((PREFIX / "share" / "deepspeed-ops").glob("*/*/*.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["kind"] != "device":
            continue
        content = (path.parent / manifest["filename"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == manifest["sha256"], f"{path} does not describe its file"
        variant = manifest["variant"]
        if variant.startswith("ptx"):
            assert f".target sm_{variant[3:]}".encode() in content, f"{path.name} holds other PTX"
        else:
            assert content[:4] == b"\x7fELF", f"{path.name} is no machine code"
        seen.append(f"{manifest['op']} {variant}")
    assert seen, f"{PREFIX} holds no GPU part"
    print(f"{len(seen)} GPU parts: {', '.join(seen)}")


if __name__ == "__main__":
    main()
