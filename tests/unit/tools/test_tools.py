"""What ``make`` offers: help, set-up that says what is missing, skeletons of ops, generated files."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("help", "env", "demo", "test", "lint", "bench", "docs", "op", "gen", "windows")


def tool(name: str) -> ModuleType:
    """A script of ``ci/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=cwd, capture_output=True, encoding="utf-8",
        errors="replace", timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_help_lists_every_target() -> None:
    """Fault: a target that nobody finds, because help is written by hand."""
    shown = make().stdout
    assert all(f"\n  {target} " in shown for target in TARGETS)


def test_an_old_python_is_named(tmp_path: Path) -> None:
    """Fault: a newcomer with Python 3.9 gets a syntax error from the middle of an installation."""
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1 && exit 0\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    done = make("env", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0 and "3.9.1" in done.stderr and "3.10 or newer is needed" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_skeleton_is_an_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the skeleton has drifted from what a spec must say, or its files do not parse."""
    from op_builder.spec import from_literal

    new_op = tool("new_op")
    files = new_op.files("fused_lamb")
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text, path)
    literal = ast.literal_eval(files["op_builder/ops/fused_lamb.py"].split("SPEC = ")[1])
    spec = from_literal(literal)
    assert (spec.name, spec.env_var, spec.builder) == ("fused_lamb", "DS_BUILD_FUSED_LAMB", "FusedLambBuilder")
    assert set(files) == {
        "op_builder/ops/fused_lamb.py",
        "csrc/fused_lamb/fused_lamb.cpp",
        "src/deepspeed_ops/fused_lamb.py",
        "tests/ops/test_fused_lamb.py",
    }
    monkeypatch.setattr(new_op, "ROOT", tmp_path)
    (tmp_path / "version.txt").write_text("1.0\n", encoding="utf-8")
    assert new_op.main(["fused_lamb"]) == 0
    (tmp_path / "csrc" / "fused_lamb" / "fused_lamb.cpp").write_text("mine", encoding="utf-8")
    assert new_op.main(["fused_lamb"]) == 2
    assert (tmp_path / "csrc" / "fused_lamb" / "fused_lamb.cpp").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["", "Fused", "a-b", "9x", "class", "x__y"])
def test_a_bad_name_is_refused_before_anything_is_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: half a skeleton under a name that cannot be imported."""
    assert tool("new_op").main([name]) == 2
    assert "fix: make op NAME=" in capsys.readouterr().err


def test_generators_see_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a check of generated files that cannot fail."""
    gen = tool("gen")
    for module in (gen, sys.modules["pins"], sys.modules["recipe_files"]):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for folder in ("docs", "recipe", "docker", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("pyproject.toml", "version.txt", "op_builder/errors.py", "src/deepspeed_ops/ds_report.schema.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    assert gen.main([]) == 0 and gen.stale() == []
    page = tmp_path / "docs" / "ops.md"
    page.write_text(page.read_text(encoding="utf-8") + "x", encoding="utf-8")
    project = tmp_path / "pyproject.toml"
    project.write_text(project.read_text(encoding="utf-8").replace("torch>=", "torch>"), encoding="utf-8")
    found = gen.stale()
    assert found[0] == "docs/ops.md" and "torch>=" in found[1]
    assert gen.main(["--check"]) == 1


def test_the_gate_is_the_two_targets() -> None:
    """Fault: CI runs something else than what a contributor is told to run."""
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make lint" in gate and "make test" in gate and "CI=true" in gate
    assert (ROOT / "README.md").read_text(encoding="utf-8").index("make demo") < 300


def test_demo_arithmetic() -> None:
    """Fault: a ratio that says the opposite, or a median of unpaired times."""
    sys.path.insert(0, str(ROOT / "src"))
    from deepspeed_ops import demo

    assert demo.ratio([2.0, 20.0, 30.0], [1.0, 10.0, 10.0]) == 2.0
    assert demo.elements([(3, 4), (5,), ()]) == 12 + 5 + 1
    assert 24e6 < demo.elements(demo.LARGE_SHAPES) < 26e6


def test_demo_runs(tmp_path: Path) -> None:
    """Fault: the first command of the README does not work."""
    for needed in ("torch", "sklearn", "matplotlib"):
        pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e '.[demo]' torch")
    sys.path.insert(0, str(ROOT / "src"))
    from deepspeed_ops import demo

    picture = tmp_path / "demo.png"
    assert demo.main(["--epochs", "2", "--small", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
