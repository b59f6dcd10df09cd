"""Which builds which machine gets; the machines are virtual packages, the packages are ours beside stand-ins."""

from __future__ import annotations

import pytest
from conda_channel import solve
from conda_channel.place import Place
from conda_channel.solve import MACHINES

from op_builder import conda, matrix

CUBINS = {conda.cubin_package(release) for release in conda.ship_releases()}
# Label -> build of deepspeed-ops-gpu; None: there is no solution.
WANTED = {
    "Linux, no GPU": "cpu_0",
    "Linux, driver of CUDA 11.8": "cpu_0",
    "Linux, driver of CUDA 12.4": "cuda_0",
    "Linux, driver of CUDA 13.0": "cuda_0",
    "Linux, driver of CUDA 13.2": "cuda_0",
    "Linux, glibc 2.17": None,
    "Linux on ARM, no GPU": "cpu_0",
    "Linux on ARM, driver of CUDA 13.0": "cuda_0",
    "Windows, no GPU": "cpu_0",
    "Windows, driver of CUDA 12.8": "cuda_0",
    "macOS on ARM": "cpu_0",
}
BY_LABEL = {m.label: m for m in MACHINES}


def test_every_machine_of_the_table_has_a_wanted_result() -> None:
    """Fault: a row that is printed and not checked."""
    assert set(WANTED) == set(BY_LABEL)


@pytest.mark.parametrize("label", WANTED)
def test_the_build_that_a_machine_gets(label: str, place: Place) -> None:
    """Fault: a CPU build on a machine with a GPU, GPU code on one without, another platform's library."""
    found, machine = solve.solve(place, BY_LABEL[label]), BY_LABEL[label]
    if WANTED[label] is None:
        assert "__glibc" in found.error and not found.records
        return
    assert not found.error
    assert found.ours["deepspeed-ops-gpu"] == WANTED[label]
    assert CUBINS & found.names == (CUBINS if WANTED[label] == "cuda_0" else set())
    (host,) = [r for r in found.records if r.name.normalized == "deepspeed-ops-host"]
    assert host.subdir == machine.platform
    assert {"deepspeed", "deepspeed-base", "deepspeed-ops", "pytorch", "apache-tvm-ffi"} <= found.names


def test_asking_for_gpu_code_on_an_old_driver_names_the_driver(place: Place) -> None:
    """Fault: a solver error that lists everything but the reason."""
    old = BY_LABEL["Linux, driver of CUDA 11.8"]
    found = solve.solve(place, old, ["deepspeed", "deepspeed-ops-gpu * cuda*"])
    assert not found.records
    assert f"__cuda >={conda.ship_releases()[0][0]}" in found.error


def test_only_one_package_depends_on_the_driver(place: Place) -> None:
    """Fault: `__cuda` on a package that a machine without a GPU needs too."""
    gpu = solve.solve(place, BY_LABEL["Linux, driver of CUDA 13.0"])
    asking = {r.name.normalized for r in gpu.records if any("__cuda" in d for d in r.depends)}
    assert asking == {"deepspeed-ops-gpu"}


def test_torch_is_the_users_where_the_work_alone_is_asked_for(place: Place) -> None:
    """Fault: `conda install deepspeed-base` brings a second torch over one that pip installed."""
    found = solve.solve(place, BY_LABEL["Linux, no GPU"], ["deepspeed-base"])
    assert not found.error and "pytorch" not in found.names
    too_old = solve.solve(place, BY_LABEL["Linux, no GPU"], ["deepspeed-base", "pytorch <2"])
    assert not too_old.records


def test_the_downloads_are_small(place: Place) -> None:
    """Fault: a machine without a GPU pays for GPU code; GPU code that grows without anybody noticing."""
    small = solve.solve(place, BY_LABEL["Linux, no GPU"]).our_bytes
    large = solve.solve(place, BY_LABEL["Linux, driver of CUDA 13.0"]).our_bytes
    assert 50_000 < small < 2_000_000 and small < large < 8_000_000


def test_the_variants_ask_for_what_the_matrix_has() -> None:
    """Fault: a CUDA release of the variants whose compiler makes nothing of the ship set."""
    assert [matrix.dotted(r) for r in conda.ship_releases()] == list(conda.variants("0")["cuda_compiler_version"])
