"""Editable, wheel, and wheel made from an sdist: the same modules and resources."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from builds import Venv, build, clean_env, copy_checkout, install, make_venv, names, run, sources

# What an installation offers: every module that imports without torch, and every resource below op_builder's home.
ASK = """
import importlib.util, json, sys
from pathlib import Path
import deepspeed_ops.op_builder
home = Path(deepspeed_ops.op_builder.__file__).resolve().parent.parent
wanted = json.loads(sys.argv[1])
found = {}
for name in wanted["modules"]:
    try:
        spec = importlib.util.find_spec(name)
        found[name] = spec is not None and spec.origin is not None
    except ModuleNotFoundError:
        found[name] = False
resources = {r: (home / r).is_file() for r in wanted["resources"]}
print(json.dumps({"modules": found, "resources": resources, "home": str(home)}))
"""


def modules(wheel: Path) -> list[str]:
    """Dotted names of all modules in a wheel."""
    files = [n[:-3].split("/") for n in names(wheel) if n.endswith(".py") and "git_version_info_installed" not in n]
    return sorted(".".join(f[:-1] if f[-1] == "__init__" else f) for f in files)


def resources(wheel: Path) -> list[str]:
    """What lies beside op_builder in a wheel and is read at run time."""
    prefix = "deepspeed_ops/"
    return sorted(n[len(prefix) :] for n in names(wheel) if n.startswith((f"{prefix}csrc/", f"{prefix}ci/")))


def offered(venv: Venv, wheel: Path) -> dict[str, dict[str, bool]]:
    """What of the wheel's content the environment offers."""
    question = json.dumps({"modules": modules(wheel), "resources": resources(wheel)})
    answer: dict[str, dict[str, bool]] = json.loads(run(venv.python, "-c", ASK, question, cwd=venv.root).stdout)
    return answer


def test_wheel_holds_what_the_checkout_holds(checkout: Path, plain_wheel: Path) -> None:
    """Fault: a new module, header or table that works in the checkout and is missing from the wheel."""
    held = set(names(plain_wheel))
    wanted = set()
    for file in map(Path.as_posix, sources()):
        if file.startswith("src/") and file.endswith((".py", "py.typed", ".schema.json")):
            wanted.add(file.removeprefix("src/"))
        elif file.startswith("op_builder/") or (file.startswith("csrc/") and not file.endswith(".md")):
            wanted.add("deepspeed_ops/" + file)
    wanted.add("deepspeed_ops/ci/matrix.toml")
    generated = {"deepspeed/git_version_info_installed.py", "deepspeed_ops/version.json"}
    assert held == wanted | generated


def test_wheel_and_editable_offer_the_same(checkout: Path, plain_wheel: Path, tmp_path: Path) -> None:
    """Fault: a resource that is found in the checkout only, or a module that only the wheel has."""
    wheel, editable = make_venv(tmp_path / "wheel"), make_venv(tmp_path / "editable")
    install(wheel, plain_wheel)
    install(editable, "--no-build-isolation", "-e", checkout)
    seen = {kind: offered(venv, plain_wheel) for kind, venv in (("wheel", wheel), ("editable", editable))}
    assert seen["wheel"]["home"] != seen["editable"]["home"] == str(checkout.resolve())
    for kind in seen:
        lacking = [n for group in ("modules", "resources") for n, there in seen[kind][group].items() if not there]
        assert not lacking, f"{kind} lacks {lacking}"
    for script in ("ds_report", "dsr"):
        assert (wheel.python.parent / script).exists() and (editable.python.parent / script).exists()
    assert not list(wheel.python.parent.glob("*.bat"))


def test_sdist_builds_the_same_wheel(checkout: Path, plain_wheel: Path, tmp_path: Path) -> None:
    """Fault: MANIFEST.in lacks a file, so that the wheel made from the sdist differs; or it gets another version."""
    sdist = build(checkout, tmp_path / "sdist", "--sdist")[0][0]
    with tarfile.open(sdist) as archive:
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = next((tmp_path / "unpacked").iterdir())
    wheel = build(unpacked, tmp_path / "wheel", "--wheel")[0][0]
    assert wheel.name == plain_wheel.name
    assert names(wheel) == names(plain_wheel)
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(plain_wheel) as b:
        assert [n for n in names(wheel) if a.read(n) != b.read(n)] == []


def test_a_checkout_without_links_builds_the_same(checkout: Path, plain_wheel: Path, tmp_path: Path) -> None:
    """Fault (DeepSpeed PR#8551, #3406): links become text on Windows, and the wheel holds two-line "modules"."""
    origin = copy_checkout(tmp_path / "origin")
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.autocrlf=false")
    run(*git, "init", "-q", ".", cwd=origin)
    run(*git, "add", "-A", cwd=origin)
    run(*git, "commit", "-q", "-m", "all", cwd=origin)
    run(*git, "clone", "-q", "-c", "core.symlinks=false", origin, tmp_path / "clone", cwd=tmp_path)
    lists = []
    for attempt in ("first", "second"):
        files, _ = build(tmp_path / "clone", tmp_path / attempt, "--sdist", "--wheel")
        wheel = next(f for f in files if f.suffix == ".whl")
        with tarfile.open(next(f for f in files if f.name.endswith(".tar.gz"))) as archive:
            lists.append((names(wheel), sorted(archive.getnames())))
    assert lists[0] == lists[1]
    assert lists[0][0] == names(plain_wheel)


def test_build_leaves_the_source_alone(checkout: Path, plain_wheel: Path) -> None:
    """Fault: git_version_info_installed.py written into the source tree, where the next build picks it up."""
    left = {p.relative_to(checkout).parts[0] for p in checkout.rglob("*") if p.is_file()}
    assert not list((checkout / "src" / "deepspeed").rglob("*installed*"))
    assert not (checkout / "src" / "deepspeed_ops" / "version.json").exists()
    assert left - {f.parts[0] for f in sources()} <= {"build"}


def test_version_travels_from_the_variable_to_the_installation(checkout: Path, tmp_path: Path) -> None:
    """Fault: the wheel's name says one version, the module another."""
    copy = copy_checkout(tmp_path / "src")
    wheel = build(copy, tmp_path / "out", "--wheel", DS_BUILD_STRING="+site.7")[0][0]
    release = (copy / "version.txt").read_text(encoding="utf-8").strip()
    assert wheel.name == f"deepspeed-{release}+site.7-py3-none-any.whl"
    venv = make_venv(tmp_path / "venv")
    install(venv, wheel)
    code = "import deepspeed, deepspeed.git_version_info_installed as i; print(deepspeed.__version__, i.version)"
    assert run(venv.python, "-c", code, cwd=venv.root).stdout.split() == [f"{release}+site.7"] * 2


@pytest.mark.parametrize("argument", ["--plat-name=manylinux2014_x86_64"])
def test_a_platform_is_proved_not_asserted(checkout: Path, tmp_path: Path, argument: str) -> None:
    """Fault: a wheel is called manylinux because somebody said so."""
    done = subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel", argument, "-d", str(tmp_path)],
        cwd=checkout, env=clean_env(), capture_output=True, encoding="utf-8", errors="replace", timeout=300,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "nothing else is asserted" in done.stderr
    assert not list(tmp_path.glob("*.whl"))
