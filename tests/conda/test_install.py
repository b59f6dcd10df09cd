"""A fresh environment: what the user runs first, with no variable set and nothing but the environment on PATH."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
from conda_channel import solve
from conda_channel.place import BUILD_PLATFORM, Place
from conftest import ROOT, Run

from deepspeed_ops import version
from op_builder.spec import all_specs

OURS = ("deepspeed", "deepspeed-base", "deepspeed-ops", "deepspeed-ops-host", "deepspeed-ops-gpu")
HERE = solve.Machine("this one", BUILD_PLATFORM)


def records(prefix: Path) -> dict[str, dict[str, object]]:
    """What conda-meta says, by name."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in (prefix / "conda-meta").glob("*.json")]
    return {r["name"]: r for r in found}


def test_the_report(prefix: Path, run: Run) -> None:
    """Fault: parts that are installed where the resolver does not look."""
    report = json.loads(run(prefix, "ds_report", "--json"))
    text = run(prefix, "ds_report")
    for op, spec in all_specs().items():
        assert op in text
        if spec.host:
            assert str(prefix / "share" / "deepspeed-ops") in json.dumps(report), op


def test_every_cpu_op_runs_without_a_compiler(prefix: Path, run: Run) -> None:
    """Fault: an installed part that a first use compiles again, on a machine that has no compiler."""
    said = run(prefix, "python", ROOT / "recipe" / "run_cpu_ops.py", more={"DS_JIT": "0"})
    assert said.count("largest error") == 3 and "every host library loads" in said
    for level in ("scalar", "avx2"):
        run(prefix, "python", ROOT / "recipe" / "run_cpu_ops.py", more={"DS_JIT": "0", "DS_SIMD": level})
    assert not list((prefix / "home").rglob("*.so"))


def test_async_io_uses_the_environments_own_libaio(prefix: Path, run: Run) -> None:
    """Fault: conda's libaio is installed and never found, since nobody searches an environment's lib."""
    code = "import deepspeed_ops.aio as a; a.backends(); print(open('/proc/self/maps').read())"
    assert f"{prefix}/lib/libaio.so.1" in run(prefix, "python", "-c", code)


def test_import_needs_no_torch_and_is_quiet(prefix: Path, run: Run) -> None:
    """Fault: an import that prints, probes or pulls torch in."""
    assert run(prefix, "python", "-c", "import deepspeed, sys; assert 'torch' not in sys.modules") == ""


def test_pip_agrees(prefix: Path, run: Run) -> None:
    """Fault: metadata that contradicts what conda installed."""
    assert "No broken requirements" in run(prefix, "python", "-m", "pip", "check")
    listed = {r["name"]: r["version"] for r in json.loads(run(prefix, "python", "-m", "pip", "list", "--format=json"))}
    wanted = version.of_tree(ROOT, {"DS_BUILD_STRING": " "}).version
    assert (listed["deepspeed"], listed["deepspeed-ops"]) == (wanted, wanted)


def test_metadata(prefix: Path) -> None:
    """Fault: a package without a license file, links or a version."""
    found = records(prefix)
    for name in OURS:
        package = found[name]
        info = Path(str(package["extracted_package_dir"])) / "info"
        about = json.loads((info / "about.json").read_text(encoding="utf-8"))
        assert about["license"] == "Apache-2.0" and (info / "licenses" / "LICENSE").is_file(), name
        assert about["summary"] and all(about[link] for link in ("home", "doc_url", "dev_url")), name
    exports = Path(str(found["deepspeed-ops"]["extracted_package_dir"])) / "info" / "run_exports.json"
    weak = json.loads(exports.read_text(encoding="utf-8"))["weak"]
    assert len(weak) == 1 and weak[0].startswith("deepspeed-ops >=")


def test_no_file_belongs_to_two_packages(prefix: Path) -> None:
    """Fault: two of our packages that overwrite each other and are broken by each other's removal."""
    seen: dict[str, str] = {}
    for name, package in records(prefix).items():
        for file in package["files"] if name in OURS else ():  # type: ignore[attr-defined]
            assert seen.setdefault(file, name) == name, file


def test_beside_a_torch_from_pypi(place: Place, run: Run, tmp_path: Path) -> None:
    """Fault: an installation that replaces, hides or cannot use the torch that pip put there."""
    base = tmp_path / "env"
    torch = next(place.wheels.glob("torch-*.whl"))
    others = sorted(p for p in place.wheels.glob("*.whl") if p != torch and "tvm_ffi" not in p.name)
    solve.install(place, solve.solve(place, HERE, ["python", "pip"]), base)
    run(base, "python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", torch, *others)
    site = base / "lib" / sysconfig.get_path("purelib").split("/lib/")[-1]
    before = sorted(p.stat().st_mtime_ns for p in (site / "torch").glob("*.py"))
    installed = solve.solve(place, HERE, ["python", "pip", "deepspeed-base"])
    assert "pytorch" not in installed.names
    solve.add(place, installed, base)
    assert before == sorted(p.stat().st_mtime_ns for p in (site / "torch").glob("*.py"))
    assert "every host library loads" in run(base, "python", ROOT / "recipe" / "run_cpu_ops.py", more={"DS_JIT": "0"})
    assert "No broken requirements" in run(base, "python", "-m", "pip", "check")


def test_uninstall_leaves_nothing(place: Place, run: Run, tmp_path: Path) -> None:
    """Fault: files that no package owns, so that nobody removes them."""
    target = tmp_path / "env"
    with_ours = solve.solve(place, solve.Machine("a GPU", BUILD_PLATFORM, "13.0"), ["deepspeed-base"])
    solve.install(place, with_ours, target)
    run(target, "ds_report", more={"TORCH_EXTENSIONS_DIR": str(tmp_path / "store")})
    solve.uninstall(place, target)
    for cache in [*target.rglob("__pycache__"), target / "home"]:  # what running made
        shutil.rmtree(cache, ignore_errors=True)
    installers = {target / "CACHEDIR.TAG", *(target / "conda-meta").rglob("*")}
    assert not [p for p in target.rglob("*") if p.is_file() and p not in installers]


@pytest.mark.parametrize("broken", ["cpu_adam", "fused_adam"])
def test_the_packages_own_test_sees_a_damaged_part(broken: str, place: Place, run: Run, tmp_path: Path) -> None:
    """Fault: a test inside a package that passes whatever the package holds."""
    target = tmp_path / "env"
    solve.install(place, solve.solve(place, HERE, ["deepspeed-ops-host", "python"]), target)
    for part in (target / "share" / "deepspeed-ops" / broken).rglob("*.so"):
        content = part.read_bytes()
        part.unlink()  # the cache's file is linked here
        part.write_bytes(content[: len(content) // 2])
    script = ROOT / "recipe" / "load_host_parts.py"
    said = run(target, "python", script, check=False, more={"CONDA_PREFIX": str(target)})
    assert "is not what was built" in said
