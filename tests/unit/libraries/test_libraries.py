"""Libraries that ops open at run time: found by linking and by opening, missing ones named with the right package."""

from __future__ import annotations

from pathlib import Path

import pytest

from op_builder.commands import Completed
from op_builder.libraries import LIBRARIES, distribution_family, find, how_to_install, io_uring
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.toolchain import HostCompiler

GXX = HostCompiler("gcc", Path("/usr/bin/g++"), (12, 2, 0), "x86_64-linux-gnu", "g++ 12")
RELEASES = {
    'ID=debian\nVERSION_ID="12"': "debian",
    "ID=ubuntu\nID_LIKE=debian": "debian",
    'ID="rhel"\nID_LIKE="fedora"': "fedora",
    'ID="rocky"\nID_LIKE="rhel centos fedora"': "fedora",
    'ID="amzn"': "fedora",
    "ID=arch": "arch",
    'ID="opensuse-leap"\nID_LIKE="suse opensuse"': "suse",
    "ID=alpine": "alpine",
    "ID=nixos": "nixos",
    "": "",
}


def absent(_: str) -> object:
    """A loader that opens nothing."""
    raise OSError("no such file")


def linker(works: bool, seen: list[list[str]]) -> object:
    """A compiler whose programs link with the library or not."""

    def run(argv: object) -> Completed:
        seen.append([str(a) for a in argv])  # type: ignore[attr-defined]
        asked = any(str(a).startswith("-l") for a in argv)  # type: ignore[attr-defined]
        return Completed(0) if works or not asked else Completed(1, "", "ld: cannot find -laio")

    return run


@pytest.mark.parametrize(("text", "family"), RELEASES.items())
def test_distributions(text: str, family: str) -> None:
    """Fault: Rocky is told to use apt."""
    assert distribution_family(text) == family


def test_every_distribution_gets_its_own_command() -> None:
    """Fault (DeepSpeed): dpkg, pacman and rpm are asked in turn, and none knows conda."""
    aio = LIBRARIES["libaio"]
    assert how_to_install(aio, "debian", False) == "apt-get install libaio-dev"
    assert how_to_install(aio, "arch", False) == "pacman -S libaio"
    assert how_to_install(aio, "fedora", False) == "dnf install libaio-devel"
    assert how_to_install(aio, "debian", True) == "conda install -c conda-forge libaio"
    unknown = how_to_install(aio, "nixos", False)
    assert all(name in unknown for name in ("libaio-dev", "libaio-devel", "conda"))


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("opens", [True, False])
def test_present_and_absent(links: bool, opens: bool) -> None:
    """Fault: headers without a library count as present, or a library without headers as absent."""
    seen: list[list[str]] = []
    settings = Settings.read({"CFLAGS": "-I/opt/aio/include", "LDFLAGS": "-L/opt/aio/lib"})
    load = (lambda name: name) if opens else absent
    found = find("libaio", GXX, settings, family="debian", system="linux", run=linker(links, seen), load=load)  # type: ignore[arg-type]
    assert found is not None and bool(found.links) is links and bool(found.opens) is opens
    assert "-I/opt/aio/include" in seen[0] and "-L/opt/aio/lib" in seen[0] and "-laio" in seen[0]
    assert found.fix == ("" if opens else "apt-get install libaio-dev")
    assert ("io_uring and threads serve" in found.text) is not opens


def test_a_library_that_answers_by_its_new_name() -> None:
    """Fault: Ubuntu 24.04 calls it libaio.so.1t64."""

    def load(name: str) -> object:
        if name != "libaio.so.1t64":
            raise OSError(name)
        return name

    found = find("libaio", None, Settings.read({}), family="debian", system="linux", load=load)
    assert found is not None and found.opens == "libaio.so.1t64" and found.links.state == "could not test"


def test_other_systems_miss_nothing() -> None:
    """Fault: a Windows user is told to install a Linux library."""
    assert find("libaio", GXX, Settings.read({}), family="", system="win32", load=absent) is None
    assert "Linux only" in io_uring("darwin") and "io_uring_setup" in io_uring("linux")


def test_every_need_is_known() -> None:
    """Fault: a spec names a library that nobody describes."""
    assert {need for spec in all_specs().values() for need in spec.needs} <= set(LIBRARIES)
