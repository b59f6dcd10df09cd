"""The parts a cell or a set consists of, planned and not yet built. Needs no CUDA compiler: a key names its release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from op_builder.cells import Cell, Release
from op_builder.cuda_toolkits import Nvrtc, release_archs
from op_builder.host import HostFacts
from op_builder.plan import PartPlan, package_version, plan_device, plan_host
from op_builder.settings import Settings
from op_builder.spec import OpSpec, all_specs
from op_builder.targets import Target, ship_set
from op_builder.toolchain import Toolchain

Want = tuple[Target, Release]


def stand_in(release: Release) -> Nvrtc:
    """NVRTC of a release before it is fetched: enough to plan with, since a part's key holds the release alone."""
    return Nvrtc(Path("unfetched"), None, release, release_archs(release), "pypi")


def wants_of_cells(chosen: Iterable[Cell]) -> list[Want]:
    """GPU targets of these cells, each with the release that makes it, once each."""
    return sorted({(c.target, c.cuda) for c in chosen if c.target is not None and c.cuda is not None})


def wants_of_ship() -> list[Want]:
    """GPU targets of wheels and conda packages."""
    return list(ship_set())


def device_plans(
    wants: Iterable[Want], home: Path, compilers: Mapping[Release, Nvrtc], specs: Mapping[str, OpSpec] | None = None
) -> list[PartPlan]:
    """Every op's GPU part for each of these targets, as far as the op supports it."""
    csrc, version = home / "csrc", package_version(home)
    found = []
    for target, release in wants:
        compiler = compilers.get(release) or stand_in(release)
        for spec in (all_specs() if specs is None else specs).values():
            if spec.device and (spec.min_sm is None or target.capability >= tuple(spec.min_sm)):
                found.append(plan_device(spec, target, compiler, csrc, version))
    return found


def host_plans(
    home: Path, toolchain: Toolchain, settings: Settings, host: HostFacts, specs: Mapping[str, OpSpec] | None = None
) -> list[PartPlan]:
    """Every op's host library for this platform."""
    chosen = (all_specs() if specs is None else specs).values()
    csrc, version = home / "csrc", package_version(home)
    return [plan_host(spec, toolchain, settings, host, csrc, version) for spec in chosen if spec.host]


def once(plans: Sequence[PartPlan]) -> list[PartPlan]:
    """Without those of equal key: cells share parts."""
    return list({plan.key: plan for plan in plans}.values())
