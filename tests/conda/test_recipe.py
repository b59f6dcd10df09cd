"""The recipe itself: renders everywhere, builds the same twice, and refuses what it cannot build."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import rattler
from conda_channel import build
from conda_channel.place import BUILD_PLATFORM, RECIPE, Place
from conftest import ROOT
from packaging.requirements import Requirement

from op_builder import conda, matrix
from op_builder.errors import OpBuildError, UsageError

PLATFORMS = [p.conda for p in matrix.load().platforms.values()]


def names(platform: str) -> list[str]:
    """Names of what is built for a platform."""
    return [made.recipe.package.name for made in build.render(platform)]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_renders(platform: str) -> None:
    """Fault: a recipe that only its author's platform can read; noarch packages built once per platform."""
    noarch = ["deepspeed", "deepspeed-base", "deepspeed-ops", "deepspeed-ops-gpu", "deepspeed-ops-gpu"]
    noarch += [conda.cubin_package(r) for r in conda.ship_releases()]
    wanted = ["deepspeed-ops-host", *(noarch if platform == BUILD_PLATFORM else [])]
    assert sorted(names(platform)) == sorted(wanted)
    compilers = {
        "linux-64": "gxx_linux-64",
        "linux-aarch64": "gxx_linux-aarch64",
        "win-64": "vs",
        "osx-arm64": "clangxx",
    }
    needs = build.render(platform)[0].recipe.requirements.to_dict()["build"]
    assert any(n.startswith(compilers[platform]) for n in needs)


def test_the_readme_counts_what_is_rendered() -> None:
    """Fault: a number in prose that nobody counts again."""
    total = sum(len(names(platform)) for platform in PLATFORMS)
    assert f"**{total} builds**" in (RECIPE / "README.md").read_text(encoding="utf-8")


# pip notes the folder it installed from, and RECORD holds that note's digest: what recipe/README.md lists.
MAY_DIFFER = ("direct_url.json", "RECORD")


def digests(package: Path) -> dict[str, str]:
    """sha256 of each installed file, from the package's own list; nothing for those that may differ."""
    listed = rattler.PathsJson.from_package_archive(package).paths
    return {str(e.relative_path): "" if e.relative_path.name in MAY_DIFFER else str(e.sha256) for e in listed}


def test_two_builds_are_equal(place: Place, tmp_path: Path) -> None:
    """Fault: a package whose digest says nothing about what it was made of."""
    again = tmp_path / "again"
    wanted = {"deepspeed-ops-host", "deepspeed-ops", conda.cubin_package(conda.ship_releases()[-1])}
    made = [
        v for v in build.render(BUILD_PLATFORM, [build.variants_of_standins(place)]) if v.recipe.package.name in wanted
    ]
    for package in build.build(place, made, again).packages:
        first = place.channel / package.parent.name / package.name
        assert digests(package) == digests(first) and digests(package), package.name


def test_an_unknown_cuda_is_an_error(tmp_path: Path) -> None:
    """Fault: a release that nobody knows silently becomes another one."""
    text = (RECIPE / "variants.yaml").read_text(encoding="utf-8")
    newest = matrix.dotted(conda.ship_releases()[-1])
    variants = tmp_path / "variants.yaml"
    variants.write_text(text.replace(f'"{newest}"', '"99.9"'), encoding="utf-8")
    with pytest.raises(UsageError) as found:
        build.render(BUILD_PLATFORM, variants=variants)
    assert str(variants) in str(found.value) and "99.9" in str(found.value) and newest in str(found.value)


def mutated(folder: Path, change: tuple[str, str]) -> Path:
    """A copy of this checkout's recipe in its checkout, with one text replaced."""
    ignored = shutil.ignore_patterns("build", ".git", ".venv", "parts", "__pycache__", "results")
    shutil.copytree(ROOT, folder, ignore=ignored)
    recipe = folder / "recipe" / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8")
    assert text.count(change[0]) >= 1
    recipe.write_text(text.replace(*change), encoding="utf-8")
    return recipe


@pytest.mark.parametrize(
    ("dropped", "output", "package"),
    [
        ("        - ${{ compiler('cxx') }}\n", "deepspeed-ops-host", "cxx-compiler"),
        ("        - ${{ compiler('cuda') }}\n", conda.cubin_package(conda.ship_releases()[0]), "cuda-nvcc"),
    ],
    ids=["compiler", "nvcc"],
)
def test_a_missing_tool_says_which_package_brings_it(
    dropped: str, output: str, package: str, place: Place, tmp_path: Path
) -> None:
    """Fault: "command not found" without a word about what to add to the recipe, or the system's compiler in its place.

    This machine has a g++ and an nvcc of its own, which a build must not see.
    """
    recipe = mutated(tmp_path / "checkout", (dropped, ""))
    made = build.render(BUILD_PLATFORM, [build.variants_of_standins(place)], recipe)
    chosen = [v for v in made if v.recipe.package.name == output]
    with pytest.raises(OpBuildError, match=f"conda package: {package}"):
        build.build(place, chosen[:1], tmp_path / "out")


def test_without_libaio_the_packages_own_test_fails(place: Place, tmp_path: Path) -> None:
    """Fault: a dependency that is opened at run time, so that a build without it looks complete."""
    recipe = mutated(tmp_path / "checkout", ("        - if: linux\n          then: libaio\n", ""))
    made = build.render(BUILD_PLATFORM, [build.variants_of_standins(place)], recipe)
    chosen = [v for v in made if v.recipe.package.name == "deepspeed-ops-host"]
    out = tmp_path / "out"
    (package,) = build.build(place, chosen, out).packages
    count, failed = build.run_tests(place, package, [out.as_uri(), place.standins.as_uri()])
    assert count == 1 and len(failed) == 1 and "libaio.so.1" in failed[0]


def test_run_dependencies_are_those_of_pyproject() -> None:
    """Fault: a dependency added to the wheel and forgotten in the recipe."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("dependencies = [")[2].partition("]\n")[0]
    asked = [Requirement(line.strip().strip('",').replace("\\", "")) for line in listed.splitlines() if line.strip()]
    wheel = {r.name: r.specifier for r in asked if r.marker is None and r.name != "torch"}
    (ops,) = (v for v in build.render(BUILD_PLATFORM) if v.recipe.package.name == "deepspeed-ops")
    run = [Requirement(r) for r in ops.recipe.requirements.to_dict()["run"]]
    ours = {
        r.name.removeprefix("python-"): r.specifier
        for r in run
        if r.name != "python" and not r.name.startswith("deepspeed")
    }
    assert ours == wheel
