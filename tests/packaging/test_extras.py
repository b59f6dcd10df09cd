"""Every extra that DeepSpeed has resolves: versions exist for it that agree with each other and with torch.

Resolved by uv from metadata alone: nothing is downloaded that a wheel's description does not need, torch least of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from builds import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from op_builder import matrix

sys.path.insert(0, str(ROOT / "ci"))
import pins

# DeepSpeed's names, as its users type them.
NAMES = ("all", "1bit", "1bit_mpi", "inf", "autotuning", "autotuning_ml", "dev", "sparse_attn", "sd", "readthedocs")
PYTHONS = matrix.load().pythons


def uv() -> str:
    """uv of the environment that runs the tests."""
    program = Path(sysconfig.get_path("scripts")) / ("uv.exe" if os.name == "nt" else "uv")
    if not program.exists():
        pytest.skip("uv is missing: pip install uv")
    return str(program)


def resolve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [uv(), "pip", "compile", "--quiet", "--no-config", "--system-certs", *arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    cache = {"UV_CACHE_DIR": str(folder / "uv-cache")}
    return subprocess.run(
        argv, cwd=ROOT, env={**env, **cache}, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
        errors="replace", timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all resolutions; without the package index there is nothing to ask."""
    folder = tmp_path_factory.mktemp("uv")
    (folder / "probe.in").write_text("tabulate\n", encoding="utf-8")
    done = resolve(folder, str(folder / "probe.in"))
    if done.returncode:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"the package index cannot be asked: {done.stderr.strip()[-300:]}")
    return folder


@pytest.fixture(scope="module", params=[PYTHONS[0], PYTHONS[-1]], ids=lambda p: f"Python {p}")
def pinned(request: pytest.FixtureRequest, cache: Path) -> dict[str, str]:
    """Name -> version of a resolution of `all` for Linux: it holds one of every other extra."""
    platform = ("--python-platform", "x86_64-unknown-linux-gnu", "--python-version", request.param)
    done = resolve(cache, "pyproject.toml", "--extra", "all", *platform)
    assert done.returncode == 0, done.stderr
    pins = (line.partition("==") for line in done.stdout.splitlines() if "==" in line and not line.startswith(" "))
    return {name.partition("[")[0]: version.partition(" ")[0] for name, _, version in pins}


@pytest.mark.parametrize("extra", NAMES)
def test_every_extra_resolves(extra: str, pinned: dict[str, str]) -> None:
    """Fault: `pip install deepspeed[all]` cannot be satisfied (upstream: two pins of triton), found out by users."""
    said = pins.matrix.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(text) for text in (*said["dependencies"], *said["optional-dependencies"][extra])]
    linux = {"platform_system": "Linux", "sys_platform": "linux", "python_version": "3.12"}
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate(linux):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version}"


def test_what_cannot_resolve_is_seen(cache: Path) -> None:
    """Fault: a check that passes whatever it is given. DeepSpeed's own pin for sparse_attn is the example."""
    (cache / "bad.in").write_text("triton==1.0.0\ntorch>=2.4\n", encoding="utf-8")
    platform = ("--python-platform", "x86_64-unknown-linux-gnu", "--python-version", "3.12")
    done = resolve(cache, str(cache / "bad.in"), *platform)
    assert done.returncode != 0 and "triton" in done.stderr


def test_extras_are_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: requirements/*.txt and the extras of the same names drift apart."""
    assert pins.extras_differ() == []
    assert set(NAMES) <= {"all", *pins.EXTRAS}
    read = pins.requirements
    monkeypatch.setattr(pins, "requirements", lambda file: [*read(file), "x"] if "sd" in file else read(file))
    found = pins.extras_differ()
    assert [w for w in found if "extra sd" in w] and [w for w in found if "extra all" in w]
