"""Real mounts: noexec, full, read-only. Each in a mount namespace of its own, which ends with the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ASK = """
import sys, warnings, logging
sys.modules["torch"] = None
from pathlib import Path
from op_builder.errors import OpsError
from op_builder.loader import Loader
from op_builder.settings import Settings
from op_builder.store import jit_store
from tests.toys import toy_spec
logging.basicConfig()
try:
    answer = Loader(home=Path(sys.argv[1]), spec_of=lambda _: toy_spec()).host_module("toy")["answer"]()
    print(answer, jit_store(Settings.read()).root)
except OpsError as exc:
    print(f"{type(exc).__name__}: {exc}")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Sources of the toy op."""
    from op_builder.process import platform_facts
    from op_builder.settings import Settings
    from op_builder.toolchain import discover_host
    from tests.toys import toy_home

    found = discover_host(Settings.read(), platform_facts())
    if found.host is None or found.ffi is None or found.ninja is None:
        pytest.skip(f"missing: a C++ compiler, ninja or apache-tvm-ffi ({found.problems})")
    return toy_home(tmp_path / "home")


def inside(setup: str, home: Path, place: Path, **env: str) -> str:
    """Mount something at ``place``, then load the op there; what it said."""
    if not shutil.which("unshare") or os.geteuid() != 0:
        pytest.skip("mounting needs root and unshare")
    place.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS") and not k.startswith(("DS_", "TORCH_"))}
    argv = ["unshare", "-m", "sh", "-ec", f'{setup}\nexec "$@"', "sh", sys.executable, "-c", ASK, str(home)]
    done = subprocess.run(
        argv, env={**kept, "PYTHONPATH": str(ROOT), "PLACE": str(place), **env}, cwd=ROOT, timeout=120, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
    )  # fmt: skip
    if "mount:" in done.stdout:
        pytest.skip(f"this kernel or container mounts nothing: {done.stdout.strip()}")
    return done.stdout


def test_a_home_without_the_right_to_execute(home: Path, tmp_path: Path) -> None:
    """Fault: the op is compiled into a folder it cannot be loaded from, and the part is quarantined for it."""
    mount, place = 'mount -t tmpfs -o noexec none "$PLACE"', tmp_path / "a b"
    said = inside(mount, home, place, HOME=str(place), TMPDIR=str(tmp_path), XDG_CACHE_HOME="")
    assert f"42 {tmp_path}/deepspeed_ops-" in said and "noexec" in said and "TORCH_EXTENSIONS_DIR" in said
    said = inside(mount, home, place, TORCH_EXTENSIONS_DIR=str(place))
    assert "StoreError" in said and "noexec" in said and str(place) in said


def test_a_packaged_part_on_a_noexec_mount_is_not_the_parts_fault(home: Path, tmp_path: Path) -> None:
    """Fault: "failed to map segment", nobody says why, and the same part is refused wherever it is moved to."""
    made = inside("true", home, tmp_path / "place", TORCH_EXTENSIONS_DIR=str(tmp_path / "made"))
    assert made.startswith("42")
    mount = f'mount -t tmpfs -o noexec none "$PLACE"; cp -r "{tmp_path}/made/deepspeed_ops/toy" "$PLACE/"'
    env = {"DS_OPS_PATH": str(tmp_path / "place"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit")}
    said = inside(mount, home, tmp_path / "place", DS_JIT="0", **env)
    assert "LoadFailed" in said and "noexec" in said and "DS_OPS_PATH" in said
    assert not list((tmp_path / "jit").rglob("*.refused.json"))
    assert "42" in inside(mount, home, tmp_path / "place", **env), "the next candidate is built instead"


def test_a_full_disk(home: Path, tmp_path: Path) -> None:
    """Fault: a compiler's traceback; half a part that the next process takes for a whole one."""
    place = tmp_path / "full"
    mount = 'mount -t tmpfs -o size=32k none "$PLACE"'
    said = inside(mount, home, place, TORCH_EXTENSIONS_DIR=str(place))
    assert "StoreError" in said and "full" in said and "TORCH_EXTENSIONS_DIR" in said
    mount += '; dd if=/dev/zero of="$PLACE/filler" bs=1k count=64 2>/dev/null || true'
    said = inside(mount, home, place, TORCH_EXTENSIONS_DIR=str(place))
    assert "StoreError" in said and "No space left" in said


def test_a_read_only_home(home: Path, tmp_path: Path) -> None:
    """Fault: an error where a temporary folder would do; or a folder that the user named is silently replaced."""
    place = tmp_path / "ro"
    mount = 'mount -t tmpfs -o ro none "$PLACE"'
    said = inside(mount, home, place, HOME=str(place), TMPDIR=str(tmp_path), XDG_CACHE_HOME="")
    assert f"42 {tmp_path}/deepspeed_ops-" in said and "Read-only file system" in said
    said = inside(mount, home, place, TORCH_EXTENSIONS_DIR=str(place))
    assert "StoreError" in said and "Read-only file system" in said
