"""Our packages, built from the recipe against a channel of stand-ins, and the tests that travel in them."""

from __future__ import annotations

import platform
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rattler_build import (
    JinjaConfig,
    Package,
    PlatformConfig,
    RattlerBuildError,
    RenderConfig,
    RenderedVariant,
    Stage0Recipe,
    ToolConfiguration,
    VariantConfig,
    build_recipes,
)

from conda_channel.place import BUILD_PLATFORM, RECIPE, Place, environment, index
from op_builder import matrix
from op_builder.errors import OpBuildError, UsageError


@dataclass
class Outcome:
    """What was built: the packages, and seconds by name."""

    packages: list[Path] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def variants_of_standins(place: Place) -> Path:
    """The variants that the stand-ins replace in recipe/variants.yaml: this machine's Python and glibc."""
    text = f'python_min:\n  - "{sys.version_info[0]}.{sys.version_info[1]}"\nc_stdlib_version:\n  - if: linux\n'
    text += f'    then: "{platform.libc_ver()[1]}"\n'
    place.root.mkdir(parents=True, exist_ok=True)
    path = place.root / "standins.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def render(
    target: str,
    more: Sequence[Path] = (),
    recipe: Path = RECIPE / "recipe.yaml",
    variants: Path = RECIPE / "variants.yaml",
) -> list[RenderedVariant]:
    """Every build of a recipe for one platform, once each, in the order of the recipe.

    Raises:
        UsageError: the variants name a CUDA release that ci/matrix.toml lacks.
    """
    config = PlatformConfig(target_platform=target, build_platform=BUILD_PLATFORM, host_platform=target)
    chosen = VariantConfig.from_files_with_context([variants, *more], JinjaConfig(platform=config))
    refuse_unknown_cuda(chosen, variants)
    seen: dict[tuple[str, str], RenderedVariant] = {}
    for made in Stage0Recipe.from_file(recipe).render(chosen, RenderConfig(platform=config)):
        seen.setdefault((made.recipe.package.name, str(made.recipe.build.string)), made)
    return list(seen.values())


def refuse_unknown_cuda(variants: VariantConfig, path: Path) -> None:
    """Never build with another CUDA release in the place of one that nothing is known of.

    Raises:
        UsageError: names the file and what is allowed.
    """
    allowed = [matrix.dotted(release) for release in matrix.load().cuda]
    for value in variants.get("cuda_compiler_version") or []:
        if str(value) not in allowed:
            why = f"ci/matrix.toml has {', '.join(allowed)}"
            raise UsageError(f"{path}: cuda_compiler_version {value} is unknown", why, "make gen")


def build(place: Place, made: Iterable[RenderedVariant], out: Path) -> Outcome:
    """Build rendered variants into a channel, each seeing those before it.

    Raises:
        OpBuildError: one failed; what it printed stands above.
    """
    outcome = Outcome()
    index(out)
    for variant in made:
        name = variant.recipe.package.name
        try:
            with environment(place):
                done = variant.run_build(
                    tool_config=ToolConfiguration(test_strategy="skip", compression_threads=2),
                    output_dir=out,
                    channels=[out.as_uri(), place.standins.as_uri()],
                    no_build_id=True,
                )
        except RattlerBuildError as exc:
            raise OpBuildError(f"conda package {name} was not built", f"{exc}\n{end_of_log(out)}", "") from exc
        finally:
            shutil.rmtree(out / "bld", ignore_errors=True)
        outcome.packages += [Path(p) for p in done.packages]
        outcome.seconds[f"{name} {variant.recipe.build.string}"] = done.build_time
        index(out)
    return outcome


def cross_build(place: Place, target: str, more: Sequence[Path], out: Path) -> None:
    """Build the recipe for another platform than this one.

    By the older call: in py-rattler-build 0.73 ``run_build`` resolves a cross build's host environment for the platform
    it runs on.

    Raises:
        OpBuildError: it failed.
    """
    variants = [str(RECIPE / "variants.yaml"), *map(str, more)]
    try:
        with environment(place), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            build_recipes(
                [RECIPE / "recipe.yaml"], build_platform=BUILD_PLATFORM, target_platform=target, host_platform=target,
                channel=[out.as_uri(), place.standins.as_uri()], variant_config=variants, ignore_recipe_variants=True,
                no_build_id=True, test="skip", output_dir=out,
            )  # fmt: skip
    except RattlerBuildError as exc:
        raise OpBuildError(f"no conda package for {target}", f"{exc}\n{end_of_log(out)}", "") from exc
    finally:
        shutil.rmtree(out / "bld", ignore_errors=True)
    index(out)


def end_of_log(out: Path, lines: int = 25) -> str:
    """What the script of a build said last; rattler-build keeps it in the folder it worked in."""
    logs = sorted((out / "bld").rglob("conda_build.log"), key=lambda p: p.stat().st_mtime)
    return "\n".join(logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]) if logs else ""


def run_tests(place: Place, package: Path, channels: Sequence[str] | None = None) -> tuple[int, list[str]]:
    """Run the tests that travel in a package: how many it has, and the output of those that failed.

    ``run_tests`` stops at the first failure without raising: tests that did not run count as failed.
    """
    found = Package.from_file(package)
    with environment(place):
        results = found.run_tests(channel=list(channels or place.channels))
    failed = ["\n".join(r.output) for r in results if not r.success]
    if len(results) != found.test_count and not failed:
        failed.append(f"{found.test_count} tests, {len(results)} ran")
    return found.test_count, failed
