"""One host's builder: per line of input, build the toy op in a fresh store of the shared folder, load and call it.

Input: ``<store> <home of the sources>``, tab-separated. Output: one JSON line per round.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from op_builder.compile import build_part
from op_builder.plan import plan_host
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.store import Store, verify
from op_builder.toolchain import discover_host
from tests.toys import toy_spec


def main() -> None:
    """Until the input ends."""
    settings = Settings.read({k: v for k, v in os.environ.items() if not k.endswith("FLAGS")})
    tools = discover_host(settings, platform_facts())
    for line in sys.stdin:
        root, home = line.rstrip("\n").split("\t")
        said: dict[str, object] = {}
        try:
            plan = plan_host(toy_spec(), tools, settings, platform_facts(), Path(home) / "csrc", "1")
            compiled: list[str] = []
            store = Store(Path(root))
            part = build_part(plan, store, settings, compiled.append, tools.ninja)
            verify(part)
            result = (ctypes.c_int64 * 2)()
            status = ctypes.CDLL(str(part.path))["__tvm_ffi_answer"](None, None, 0, ctypes.byref(result))
            final = part.path.parent == store.final_folder("toy", plan.variant, plan.key)
            said = {"answer": result[1] if status == 0 else None, "compiled": len(compiled), "final": final}
            said["sha256"] = part.manifest.sha256
        except Exception:
            said = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
