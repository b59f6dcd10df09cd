"""System libraries that ops open at run time: what each is for, and whether it is here.

An op works without them, by another way; the report says which. What installs each stands in ``packages.py``.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import Run
from .distribution import Distribution
from .packages import PACKAGES, install_command
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
        without: what serves where it is missing.
    """

    name: str
    function: str
    link: tuple[str, ...]
    sonames: tuple[str, ...]
    without: str


LIBRARIES: Mapping[str, Library] = {
    "libaio": Library(
        "libaio",
        "io_submit",
        ("aio",),
        ("libaio.so.1", "libaio.so.1t64", "libaio.so"),
        "io_uring and threads serve",
    ),
    "cufile": Library(
        "cufile",
        "cuFileDriverOpen",
        ("cufile",),
        ("libcufile.so.0", "libcufile.so"),
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


def how_to_install(library: Library, at: Distribution) -> str:
    """The command that brings a library here; where no table knows this distribution, what others call it."""
    named = sorted({name for manager, name in PACKAGES[library.name].items() if name and manager != "pip"})
    return install_command([library.name], at) or f"install {' or '.join(named)}"


def in_prefix(library: Library, prefix: str = sys.prefix) -> tuple[str, ...]:
    """The library's files in a Python environment's own ``lib`` (conda's), where no loader looks by itself."""
    places = [Path(prefix, "lib", name) for name in library.sonames]
    return tuple(str(place) for place in places if place.is_file())


def preload(names: Sequence[str], prefix: str = sys.prefix) -> tuple[str, ...]:
    """Open an environment's own copies of libraries, so that a later ``dlopen`` of their bare names finds these.

    Args:
        names: ``needs`` of a spec; those that no row describes are nobody's business here.
        prefix: of the Python environment.

    Returns:
        The files that were opened.
    """
    known = [LIBRARIES[name] for name in names if name in LIBRARIES and sys.platform == "linux"]
    return tuple(opened for library in known if (opened := opens_as(in_prefix(library, prefix))))


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
    name: str, compiler: HostCompiler | None, settings: Settings, *, at: Distribution, system: str = sys.platform,
    run: Run | None = None, load: Callable[[str], object] = ctypes.CDLL, prefix: str = sys.prefix,
) -> Finding | None:  # fmt: skip
    """What is here of one library; None where the system has none of it.

    Args:
        name: a spec's ``needs``.
        compiler: to link with; CFLAGS, LDFLAGS, CPATH and LIBRARY_PATH count.
        settings: the environment.
        at: where commands will be pasted.
        system: ``sys.platform``.
        run: runs commands.
        load: opens a library.
        prefix: of the Python environment.
    """
    library = LIBRARIES[name]
    if system != "linux":
        return None
    opens = opens_as((*in_prefix(library, prefix), *library.sonames), load)
    links = has_function(library.function, library.link, compiler, settings, run=run)
    # Only what runs is missed: headers and the linker's name are for those who compile against it; nobody here does.
    fix = "" if opens else how_to_install(library, at)
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
