"""Every GPU op compiles for every architecture of the matrix, by the release that ships it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from op_builder.compile import build_part
from op_builder.cuda_toolkits import find_nvrtc
from op_builder.cuda_toolkits import nvrtc_folders as places
from op_builder.manifest import read_gpu
from op_builder.matrix import dotted, load
from op_builder.plan import package_version, plan_device
from op_builder.settings import Settings
from op_builder.spec import all_specs, get_spec
from op_builder.store import Store
from op_builder.targets import Target, ship_set

ROOT = Path(__file__).resolve().parent.parent.parent
GPU_OPS = [name for name, spec in all_specs().items() if spec.device]


def cells() -> list[tuple[Target, tuple[int, int]]]:
    """The ship set, and machine code of every other architecture by the oldest release that has it."""
    tables = load()
    found = dict(ship_set())
    for capability in tables.archs:
        target = Target(*capability, "sass")
        if target not in found and any(tables.archs[capability].known_to(r, "") for r in tables.cuda):
            found[target] = tables.oldest_release(capability).release
    return sorted(found.items())


@pytest.mark.parametrize("op", GPU_OPS)
@pytest.mark.parametrize(
    ("target", "release"), cells(), ids=lambda x: x.variant if isinstance(x, Target) else dotted(x)
)
def test_compiles(
    op: str, target: Target, release: tuple[int, int], nvrtc_folders: Mapping[tuple[int, int], Path], tmp_path: Path
) -> None:
    """Fault: source that one architecture's compiler refuses, or a part that is not what its name says."""
    spec = get_spec(op)
    if spec.min_sm is not None and target.capability < tuple(spec.min_sm):
        pytest.skip(f"{op} begins at {dotted(tuple(spec.min_sm))}, as its spec says")
    folder = str(nvrtc_folders[release])
    (compiler,) = find_nvrtc(places({}, (), [folder], None, Path("/nonexistent")))
    plan = plan_device(spec, target, compiler, ROOT / "csrc", package_version(ROOT))
    part = build_part(plan, Store(tmp_path, "jit"), Settings.read({}))
    facts = read_gpu(part.path.read_bytes())
    assert facts.target == target and set(facts.kernels) == set(spec.kernels)
    assert part.manifest.compiler_release == release
