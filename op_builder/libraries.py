"""System libraries that ops open at run time: what each is for, whether it is here, and how each system installs it.

An op works without them, by another way; the report says which, and what would bring the library.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .commands import Run
from .probes import Verdict, has_function
from .settings import Settings
from .toolchain import HostCompiler


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        name: as a spec's ``needs`` spells it.
        function: one that it offers, to be compiled and linked.
        link: names for the linker.
        sonames: names for the loader, best first.
        packages: install command by distribution family.
        conda: the conda package that has it, or "".
        without: what serves where it is missing.
    """

    name: str
    function: str
    link: tuple[str, ...]
    sonames: tuple[str, ...]
    packages: Mapping[str, str]
    conda: str
    without: str


LIBRARIES: Mapping[str, Library] = {
    "libaio": Library(
        "libaio",
        "io_submit",
        ("aio",),
        ("libaio.so.1", "libaio.so.1t64", "libaio.so"),
        {
            "debian": "apt-get install libaio-dev",
            "arch": "pacman -S libaio",
            "fedora": "dnf install libaio-devel",
            "suse": "zypper install libaio-devel",
            "alpine": "apk add libaio-dev",
        },
        "libaio",
        "io_uring and threads serve",
    ),
    "cufile": Library(
        "cufile",
        "cuFileDriverOpen",
        ("cufile",),
        ("libcufile.so.0", "libcufile.so"),
        {"debian": "apt-get install gds-tools", "fedora": "dnf install gds-tools"},
        "libcufile",
        "GPU memory goes through pinned memory; GPUDirect Storage was never run on real hardware",
    ),
}


@dataclass(frozen=True)
class Finding:
    """What was found of one library.

    Attributes:
        library: which.
        opens: the name it opens by, or "".
        links: whether a program with its function links here.
        fix: what would bring it; empty where nothing is missing.
    """

    library: Library
    opens: str
    links: Verdict
    fix: str = ""

    @property
    def text(self) -> str:
        """One line."""
        link = f"{self.library.function} {'links' if self.links else f'does not link ({self.links})'}"
        if self.opens:
            return f"{self.opens} opens; {link}"
        return f"not found at run time: {self.library.without}; {link}"


def distribution_family(os_release: str) -> str:
    """``debian``, ``fedora``, ``arch``, ``suse``, ``alpine``, or the system's own name, from ``/etc/os-release``."""
    pairs = (line.partition("=") for line in os_release.splitlines())
    fields = {key: value.strip().strip("\"'") for key, _, value in pairs}
    names = [fields.get("ID", ""), *fields.get("ID_LIKE", "").split()]
    families = {
        "ubuntu": "debian", "rhel": "fedora", "centos": "fedora", "amzn": "fedora", "manjaro": "arch",
        "opensuse": "suse", "sles": "suse",
    }  # fmt: skip
    known = {family for library in LIBRARIES.values() for family in library.packages}
    found = (families.get(n, n) for n in names)
    return next((n for n in found if n in known), fields.get("ID", ""))


def how_to_install(library: Library, family: str, conda: bool) -> str:
    """The command that brings a library: conda's in an environment of conda, else the distribution's.

    Args:
        library: which.
        family: from :func:`distribution_family`.
        conda: whether this Python lives in a conda environment.
    """
    if conda and library.conda:
        return f"conda install -c conda-forge {library.conda}"
    if family in library.packages:
        return library.packages[family]
    all_of = ", ".join(sorted(set(library.packages.values())))
    return f"{all_of}, conda install -c conda-forge {library.conda}"


def opens_as(sonames: Sequence[str], load: Callable[[str], object] = ctypes.CDLL) -> str:
    """The first name that the loader opens, or ""."""
    for name in sonames:
        try:
            load(name)
        except OSError:
            continue
        return name
    return ""


def find(
    name: str, compiler: HostCompiler | None, settings: Settings, *, family: str, system: str = sys.platform,
    run: Run | None = None, load: Callable[[str], object] = ctypes.CDLL,
) -> Finding | None:  # fmt: skip
    """What is here of one library; None where the system has none of it.

    Args:
        name: a spec's ``needs``.
        compiler: to link with; CFLAGS, LDFLAGS, CPATH and LIBRARY_PATH count.
        settings: the environment.
        family: of the distribution.
        system: ``sys.platform``.
        run: runs commands.
        load: opens a library.
    """
    library = LIBRARIES[name]
    if system != "linux":
        return None
    opens = opens_as(library.sonames, load)
    links = has_function(library.function, library.link, compiler, settings, run=run)
    # Only what runs is missed: headers and the linker's name are for those who compile against it; nobody here does.
    fix = "" if opens else how_to_install(library, family, bool(settings.env.get("CONDA_PREFIX")))
    return Finding(library, opens, links, fix)


def io_uring(system: str = sys.platform) -> str:
    """Whether the kernel makes a ring for this process, in words."""
    if system != "linux":
        return "io_uring is Linux only"
    import errno
    import os

    parameters = ctypes.create_string_buffer(120)
    libc = ctypes.CDLL(None, use_errno=True)
    ring = int(libc.syscall(ctypes.c_long(425), ctypes.c_uint(1), parameters))
    if ring >= 0:
        os.close(ring)
        return "io_uring_setup works"
    code = ctypes.get_errno()
    return f"io_uring_setup: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
