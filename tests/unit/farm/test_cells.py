"""Guards against a tag, a bake target, a conda string and a resolver that mean different things by one name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from farm_tool import bake, dockerfile, sets
from hypothesis import given, settings
from hypothesis import strategies as st

from op_builder.cells import Cell, cell_of_conda_build, cells, conda_build, default_torch, find_cell
from op_builder.errors import UsageError
from op_builder.gpus import Device, Driver
from op_builder.host import HostFacts
from op_builder.matrix import dotted, load
from op_builder.resolve import EXACT, Accepted, Rejected, Resolution, Want, resolve
from op_builder.targets import Target, why_not
from op_builder.toolchain import Nvrtc, Toolchain
from tests.toys import device_manifest, fake_part, toy_spec

SPEC = toy_spec(device=["toy/toy.cu"], kernels=["toy_scale"], min_sm=[6, 0])
CAPABILITIES = sorted(load().archs)
BAKE = bake.hcl("a test", load())


def bake_rows() -> dict[str, dict[str, object]]:
    """The rows of the bake file, read back from its text."""
    found = {}
    for line in BAKE.splitlines():
        if line.startswith("      { target"):
            text = re.sub(
                r'("[\w.-]+"|\b\w+) = ', lambda m: json.dumps(m[1].strip('"')) + ": ", line.strip().rstrip(",")
            )
            row = json.loads(text)
            found[row["target"]] = row
    return found


ROWS = bake_rows()


def on(cell: Cell, host: HostFacts, device: Device, jit: bool = True) -> Resolution:
    """What the resolver says in the cell's image: its one GPU part, and NVRTC out of its torch's wheels."""
    assert cell.target is not None and cell.cuda is not None
    part = fake_part(device_manifest(cell.target.variant, cell.cuda), "share")
    archs = tuple(Target(*c) for c in load().targets_of(cell.cuda))
    tools = Toolchain(nvrtc=(Nvrtc(Path("libnvrtc.so"), None, cell.cuda, archs, "torch"),))
    return resolve(SPEC, host, device, [part], tools, Want("s" * 64, "tvm-ffi 0.1", jit=jit))


HOSTS = st.builds(
    lambda cuda, branch: HostFacts("linux", "x86_64", "glibc", (2, 36), driver=Driver(f"{branch}.1", cuda)),
    st.sampled_from([(12, 0), (12, 1), (12, 4), (12, 8), (13, 0), (13, 5)]),
    st.sampled_from([525, 535, 550, 570, 580, 600]),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(cells()), HOSTS, st.sampled_from(CAPABILITIES))
def test_every_name_of_a_cell_means_what_the_resolver_does(
    cell: Cell, host: HostFacts, capability: tuple[int, int]
) -> None:
    """Fault: an image tagged sm_86 that holds other code, or a conda build string that names another cell."""
    for name in (*cell.names, *cell.tags):
        assert find_cell(name) == cell
    assert cell_of_conda_build(conda_build(cell, 3)) == (cell, 3)
    if cell.tags:
        row = ROWS[cell.bake_target]
        assert tuple(row["tags"]) == cell.tags and row["name"] == cell.name  # type: ignore[arg-type]
        assert row["torch"] == dockerfile.arguments(cell)["TORCH"]
        assert row["labels"] == dockerfile.labels(cell)
    else:
        assert cell.bake_target not in ROWS
    if cell.cuda is None or cell.target is None:
        assert sets.wants_of_cells([cell]) == []
        return
    assert sets.wants_of_cells([cell]) == [(cell.target, cell.cuda)]
    device = Device(0, "GPU-1", "toy", capability, 1 << 30, load().is_tegra(capability))
    found = on(cell, host, device)
    (part,) = [v for v in found.trace if (v.part is not None)]
    runs = not why_not(cell.target, capability, device.tegra)
    assert host.driver is not None
    loads = (
        host.driver.branch >= load().driver_floor(cell.cuda, cell.capability)
        and cell.cuda[0] <= (host.driver.cuda or (0, 0))[0]
    )
    assert isinstance(part, Accepted) is (runs and loads), found.explain()
    if isinstance(part, Accepted) and cell.capability == capability:
        assert part.rank == EXACT and found.choice == part
        assert all(name.endswith(f"-{cell.target.variant}") for name in cell.names)
        assert f"_{cell.target.variant}_" in conda_build(cell)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([c for c in cells() if c.cuda]), st.sampled_from(CAPABILITIES))
def test_an_unmatched_gpu_falls_back_to_nvrtc_or_fails_with_the_trace(cell: Cell, capability: tuple[int, int]) -> None:
    """Fault: an image on another GPU that neither compiles nor says why not."""
    host = HostFacts("linux", "x86_64", "glibc", (2, 36), driver=Driver("600.1", (13, 5)))
    device = Device(0, "GPU-1", "toy", capability, 1 << 30, load().is_tegra(capability))
    assert cell.target is not None and cell.cuda is not None
    if not why_not(cell.target, capability, device.tegra):
        assert on(cell, host, device).action == "load"
        return
    found, forbidden = on(cell, host, device), on(cell, host, device, jit=False)
    known = capability in load().targets_of(cell.cuda) and capability >= (6, 0)
    assert (found.action == "build") or not known, found.explain()
    assert forbidden.action == "fail"
    error = forbidden.error()
    assert cell.target.variant in error.why and str(error.why).count("\n  - ") == 2
    if found.action == "build":
        assert any(isinstance(v, Rejected) and v.axis == "jit" for v in forbidden.trace) and "DS_JIT=0" in str(error)


def test_the_cells_are_those_of_the_issue() -> None:
    """Fault: a release, an architecture or a torch build that silently left the farm."""
    found = cells()
    assert len({c.name for c in found}) == len(found) and len({c.bake_target for c in found}) == len(found)
    assert {c.cuda for c in found} == {None, *load().cuda}
    assert {c.target.variant for c in found if c.target} == {
        "sm70", "sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm120",
    }  # fmt: skip
    for cuda, row in load().cuda.items():
        assert {c.torch for c in found if c.cuda == cuda and c.torch} == set(row.torch)
    assert find_cell("cu121-sm86").torch == "2.4" and find_cell("cu121-sm86").tags == (
        "ds:cu121-sm86",
        "ds:cu121-torch2.4-sm86",
    )
    assert find_cell("ds:cpu").names == ("cpu",)
    assert all(not c.tags for c in found if c.capability == (8, 7)), "no official torch wheel for a system-on-chip"


def test_the_default_torch_is_what_pip_brings() -> None:
    """Fault: the short tag moves to a build of torch that nobody asked for."""
    for cuda, row in load().cuda.items():
        chosen = default_torch(cuda)
        assert chosen in row.torch or (chosen is None and not row.torch)
        by_pip = [t for t in row.torch if load().torch_pip[t] == cuda]
        assert not by_pip or chosen == by_pip[-1]


@pytest.mark.parametrize(
    ("name", "what", "why", "fix"),
    [
        ("cu121-sm120", "cannot be", "since CUDA 12.8; this one is 12.1", r"cu12\d-sm120"),
        ("cu130-sm70", "cannot be", "since CUDA 9.0 until CUDA 12.9; this one is 13.0", r"cu12\d-sm70"),
        ("cu121-torch2.9-sm80", "cannot be", "torch 2.9 has no official wheel for CUDA 12.1", "torch2.9-sm80"),
        ("cu111-sm80", "cannot be", "CUDA 11.1 is not in", r"cu121-sm80"),
        ("cu121-torch2.4-sm87", "cannot be", "system-on-chip", r"cu1\d\d-sm87"),
        ("cu121-sm60", "cannot be", "has no cells", "ci/farm build cu"),
        ("cu121-sm68", "cannot be", "sm_68 is not in", "ci/farm build cu"),
        ("cu121_sm86", "no cell is named", "names look like", "cu121-sm86"),
        ("CPU", "no cell is named", "names look like", "build cpu"),
        ("", "no cell is named", "names look like", "ci/farm build"),
    ],
)
def test_a_wrong_name_says_what_stands_against_it(name: str, what: str, why: str, fix: str) -> None:
    """Fault: 'unknown cell', and the user reads the source to learn what would have been one."""
    with pytest.raises(UsageError) as err:
        find_cell(name)
    assert what in err.value.what and why in err.value.why and re.search(fix, err.value.fix), str(err.value)


@pytest.mark.parametrize("text", ["cuda121_torch2.4_sm86", "cuda12_0", "py311_0", "cpu", "cuda121_sm86_torch2.4_0"])
def test_a_foreign_conda_string_is_refused(text: str) -> None:
    """Fault: somebody else's build string read as a cell."""
    with pytest.raises(UsageError, match="no build string of ours"):
        cell_of_conda_build(text)


def test_a_conda_string_without_an_architecture_is_the_ship_set() -> None:
    """Fault: the package of the whole ship set named after one architecture."""
    cell = Cell((12, 1), None, None)
    assert conda_build(cell) == "cuda121_0" and cell_of_conda_build("cuda121_0") == (cell, 0)


def test_render_fills_every_argument_in() -> None:
    """Fault: a rendered Dockerfile that still builds the default image."""
    for cell in cells():
        if not cell.tags:
            with pytest.raises(UsageError, match="no image"):
                dockerfile.render(cell)
            continue
        text = dockerfile.render(cell)
        for name, value in dockerfile.arguments(cell).items():
            assert len(re.findall(rf'(?m)^ARG {name}="?{re.escape(value)}"?$', text)) == 1, (cell.name, name)
        assert f"ci/farm render {cell.name}" in text.splitlines()[0]
        if cell.cuda:
            assert f'"{dotted(cell.cuda)}"' in text
