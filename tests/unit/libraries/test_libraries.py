"""Libraries that ops open at run time: found by linking and by opening, missing ones named with the right package."""

from __future__ import annotations

from pathlib import Path

import pytest

from op_builder.commands import Completed
from op_builder.distribution import Distribution
from op_builder.libraries import LIBRARIES, find, how_to_install, io_uring, preload
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.toolchain import HostCompiler

GXX = HostCompiler("gcc", Path("/usr/bin/g++"), (12, 2, 0), "x86_64-linux-gnu", "g++ 12")
DEBIAN = Distribution("debian", "Debian 12", "apt", root=True)


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


def test_every_distribution_gets_its_own_command() -> None:
    """Fault (DeepSpeed): dpkg, pacman and rpm are asked in turn, and none knows conda."""
    aio = LIBRARIES["libaio"]
    for manager, package in (("apt", "libaio-dev"), ("pacman", "libaio"), ("dnf", "libaio-devel")):
        said = how_to_install(aio, Distribution("x", "X", manager, root=True))
        assert manager in said and said.endswith(package)
    assert "conda-forge libaio" in how_to_install(aio, Distribution("debian", "Debian 12", "apt", conda="/opt/env"))
    unknown = how_to_install(aio, Distribution("nixos", "NixOS"))
    assert all(name in unknown for name in ("libaio-dev", "libaio-devel", "libaio"))


def test_an_environments_own_library_comes_first(tmp_path: Path) -> None:
    """Fault: conda's libaio lies in the environment's lib, which no loader searches, and counts as missing."""
    own = tmp_path / "lib" / "libaio.so.1"
    own.parent.mkdir()
    own.touch()

    def load(name: str) -> object:
        if name != str(own):
            raise OSError(name)
        return name

    settings = Settings.read({})
    found = find("libaio", None, settings, at=DEBIAN, system="linux", load=load, prefix=str(tmp_path))
    assert found is not None and found.opens == str(own) and not found.fix
    assert preload(["libaio", "no-such-need"], str(tmp_path)) == (), "an empty file is no library, and that is no error"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("opens", [True, False])
def test_present_and_absent(links: bool, opens: bool) -> None:
    """Fault: headers without a library count as present, or a library without headers as absent."""
    seen: list[list[str]] = []
    settings = Settings.read({"CFLAGS": "-I/opt/aio/include", "LDFLAGS": "-L/opt/aio/lib"})
    load = (lambda name: name) if opens else absent
    found = find("libaio", GXX, settings, at=DEBIAN, system="linux", run=linker(links, seen), load=load)  # type: ignore[arg-type]
    assert found is not None and bool(found.links) is links and bool(found.opens) is opens
    assert "-I/opt/aio/include" in seen[0] and "-L/opt/aio/lib" in seen[0] and "-laio" in seen[0]
    assert found.fix == ("" if opens else how_to_install(LIBRARIES["libaio"], DEBIAN))
    assert ("io_uring and threads serve" in found.text) is not opens


def test_a_library_that_answers_by_its_new_name() -> None:
    """Fault: Ubuntu 24.04 calls it libaio.so.1t64."""

    def load(name: str) -> object:
        if name != "libaio.so.1t64":
            raise OSError(name)
        return name

    found = find("libaio", None, Settings.read({}), at=DEBIAN, system="linux", load=load)
    assert found is not None and found.opens == "libaio.so.1t64" and found.links.state == "could not test"


def test_other_systems_miss_nothing() -> None:
    """Fault: a Windows user is told to install a Linux library."""
    assert find("libaio", GXX, Settings.read({}), at=DEBIAN, system="win32", load=absent) is None
    assert "Linux only" in io_uring("darwin") and "io_uring_setup" in io_uring("linux")


def test_every_need_is_known() -> None:
    """Fault: a spec names a library that nobody describes."""
    assert {need for spec in all_specs().values() for need in spec.needs} <= set(LIBRARIES)
