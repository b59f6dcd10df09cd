"""Parts whose initialiser ends the process: exit(1), a segmentation fault, an illegal instruction (DESIGN, section 5).

The first process that meets one dies in it, as it must. Every later one takes the next candidate and can say why.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from op_builder.compile import build_part
from op_builder.plan import plan_host
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.store import Part, Store
from op_builder.toolchain import Toolchain, discover_host
from tests.toys import put, toy_home, toy_spec

if os.name != "posix":
    pytest.skip("signals of POSIX are missing: these deaths cannot be staged", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings.read({k: v for k, v in os.environ.items() if not k.endswith("FLAGS")})
PLANTED = {
    "exit": ("#include <stdlib.h>\nexit(1);", 1),
    "segfault": ("*(volatile int*)8 = 1;", -signal.SIGSEGV),
    "sigill": ("__builtin_trap();", -signal.SIGILL),
    "abort": ("#include <stdlib.h>\nabort();", -signal.SIGABRT),
}
ASK = """
import json, logging, sys
sys.modules["torch"] = None  # a toy op needs none, and its import takes seconds
from pathlib import Path
from op_builder.loader import Loader
from tests.toys import toy_spec
logging.basicConfig(level=logging.WARNING)
loader = Loader(home=Path(sys.argv[1]), spec_of=lambda _: toy_spec())
print(json.dumps([loader.host_module("toy")["answer"](), loader.resolution("toy").explain()]))
"""


def process(home: Path, store: Path) -> subprocess.CompletedProcess[str]:
    """A fresh process that loads the op."""
    env = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS") and not k.startswith("DS_")}
    env |= {"TORCH_EXTENSIONS_DIR": str(store), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", ASK, str(home)], env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", errors="replace", timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    """The compiler of this machine."""
    found = discover_host(SETTINGS, platform_facts())
    if found.host is None or found.ffi is None or found.ninja is None:
        pytest.skip(f"missing: a C++ compiler, ninja or apache-tvm-ffi ({found.problems})")
    return found


@pytest.fixture(scope="module")
def good(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """What the op's own sources give."""
    root = tmp_path_factory.mktemp("good")
    plan = plan_host(toy_spec(), tools, SETTINGS, platform_facts(), toy_home(root / "home") / "csrc", "1.2.3")
    return build_part(plan, Store(root / "made"), SETTINGS, None, tools.ninja)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_part_kills_one_process_only(tmp_path: Path, tools: Toolchain, good: Part, kind: str) -> None:
    """Fault: a part that dies in its initialiser kills every rank of every job, and nobody says which part it was."""
    assert tools.host is not None
    home = toy_home(tmp_path / "home")
    body, code = PLANTED[kind]
    include, _, statement = body.rpartition("\n")
    source, library = tmp_path / "planted.cpp", tmp_path / "planted.so"
    source.write_text(f"{include}\n__attribute__((constructor)) void planted() {{ {statement} }}\n", encoding="utf-8")
    subprocess.run([*tools.host.argv, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    # The package comes before the JIT store, so the planted part is everybody's first choice.
    bad = put(Store(home / "parts", "package"), dataclasses.replace(good.manifest), library.read_bytes())
    store = tmp_path / "jit"

    first = process(home, store)
    assert first.returncode == code and "42" not in first.stdout, first.stderr
    for _ in range(2):
        later = process(home, store)
        assert later.returncode == 0, later.stderr
        answer, trace = json.loads(later.stdout)
        assert answer == 42
        assert f"{bad.path}: quarantined: a process died while loading it" in trace
        assert f"ended with {code}" in trace
