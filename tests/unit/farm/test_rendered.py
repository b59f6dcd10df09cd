"""Guards against a machine's settings in an image, a workflow that no runner takes, a prune that deletes too much."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from farm_tool import command, pip_settings, pruning, workflow
from farm_tool.home import settings_of
from farm_tool.parts import Workplace

from op_builder.matrix import load
from tests.toys import device_manifest, put
from tests.unit.farm.conftest import ROOT, Runs

LISTING = """
:env:.cert='{ca}'
:env:.find-links='/opt/wheels'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///opt/more https://mirror.example/simple'
global.index-url='https://index.example/simple'
global.timeout='180'
install.user='true'
"""


def test_only_how_to_reach_an_index_goes_into_an_image(tmp_path: Path) -> None:
    """Fault: a constraint file, a folder of wheels or a local index of this machine, which the image lacks."""
    ca = tmp_path / "ca.pem"
    ca.write_text("certificates", encoding="utf-8")
    found = pip_settings.of_listing(LISTING.format(ca=ca), {})
    assert found.ca == ca.resolve()
    assert found.conf.splitlines() == [
        "[global]", "timeout = 180", "index-url = https://index.example/simple",
        "extra-index-url = https://mirror.example/simple", "cert = /run/secrets/pip_ca",
    ]  # fmt: skip
    bare = pip_settings.of_listing("", {"SSL_CERT_FILE": str(tmp_path / "absent")})
    assert bare.conf == "[global]\n" and bare.ca is None


def test_the_workflow_calls_commands_that_exist(tmp_path: Path) -> None:
    """Fault: a job that fails in its first line on the first real runner."""
    text = workflow.workflow("a test", load())
    assert "NOT YET RUN on a real runner" in text
    parser = command.parser()
    for line in re.findall(r"ci/farm ([^\n)]*)", text.split("\njobs:", 1)[1]):
        words = line.replace("${{ matrix.cell }}", "cpu").replace('"$FARM_REGISTRY"', "r/n").split(" >> ")[0].split()
        parser.parse_args([w.strip('"') for w in words])
    checker = shutil.which("check-jsonschema") or str(Path(sys.executable).with_name("check-jsonschema"))
    if not Path(checker).exists():
        pytest.skip("check-jsonschema is missing: pip install check-jsonschema")
    (tmp_path / "farm.yml").write_text(text, encoding="utf-8")
    words = [checker, "--builtin-schema", "vendor.github-workflows", str(tmp_path / "farm.yml")]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout
    broken = text.replace("runs-on:", "runs-of:")
    (tmp_path / "farm.yml").write_text(broken, encoding="utf-8")
    assert subprocess.run(words, capture_output=True, check=False).returncode == 1, "the schema sees what is wrong"


def test_prune_keeps_what_is_needed(ci_farm: Runs, farm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a prune that costs the next build an hour, or one that frees nothing."""
    place = Workplace(command.Farm(farm), settings_of({}, None, None), ROOT)
    stale = put(place.farm.store, device_manifest("sm90"))
    monkeypatch.setattr(pruning, "plans_of", lambda *_: [])
    kept = farm / "compilers" / load().cuda[12, 1].nvrtc
    gone = farm / "compilers" / "nvidia-cuda-nvrtc-cu11==11.8.89"
    for folder in (kept, gone):
        folder.mkdir()
    (farm / "records").mkdir()
    for name in ("cpu", "cu118-sm37", "ship-set"):
        (farm / "records" / f"{name}.json").write_text("{}", encoding="utf-8")
    code, out, err = ci_farm("prune", "--dry-run")
    assert code == 0 and stale.path.parent.name in out and stale.path.is_file() and "could be" in err
    code, out, _ = ci_farm("prune")
    assert code == 0 and not stale.path.exists() and not gone.exists() and kept.is_dir()
    assert sorted(p.stem for p in (farm / "records").iterdir()) == ["cpu", "ship-set"]
    monkeypatch.undo()
    monkeypatch.setenv("DS_FARM_DIR", str(farm))


def test_user_flags_and_arch_lists_do_not_reach_the_farm() -> None:
    """Fault: parts that differ because somebody's shell has CXXFLAGS."""
    env = {"CXXFLAGS": "-O0", "TORCH_CUDA_ARCH_LIST": "8.6", "DS_BUILD_OPS": "1", "CXX": "clang++", "PATH": "/bin"}
    found = settings_of(env, None, 1.0)
    assert found.user_flags == () and found.arch_list is None and found.cxx is None and found.max_jobs in (1, 2)
    assert settings_of(env, 3, 1.0).max_jobs == 3 and settings_of({}, None, None).max_jobs is None
