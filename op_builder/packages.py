"""What a need is called by each package manager: one literal table, keyed by the names of probes, tools and needs.

``needs`` of an op's spec, the tools that the builder looks for and the programs of ``install.sh`` are rows here. An
empty name: that manager has no such package. ``pip`` stands where the package index has it for every system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .distribution import Distribution

MANAGERS = ("apt", "dnf", "zypper", "pacman", "apk", "conda", "pip")

_ROWS: tuple[tuple[str, ...], ...] = (
    # need        apt              dnf               zypper            pacman     apk              conda           pip
    ("c++", "g++", "gcc-c++", "gcc-c++", "gcc", "g++", "cxx-compiler", ""),
    ("ninja", "ninja-build", "ninja-build", "ninja", "ninja", "ninja", "ninja", "ninja"),
    ("libaio", "libaio-dev", "libaio-devel", "libaio-devel", "libaio", "libaio-dev", "libaio", ""),
    ("cufile", "gds-tools", "gds-tools", "", "", "", "libcufile", ""),
    ("mpi", "libopenmpi-dev", "openmpi-devel", "openmpi-devel", "openmpi", "openmpi-dev", "openmpi", ""),
    ("pdsh", "pdsh", "pdsh", "pdsh", "", "pdsh", "", ""),
    ("ssh", "openssh-client", "openssh-clients", "openssh-clients", "openssh", "openssh-client", "openssh", ""),
    ("git", "git", "git", "git", "git", "git", "git", ""),
    ("tvm-ffi", "", "", "", "", "", "", "apache-tvm-ffi"),
    ("torch", "", "", "", "", "", "pytorch", "torch"),
    ("nvrtc", "", "", "", "", "", "cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
)
PACKAGES: Mapping[str, Mapping[str, str]] = {row[0]: dict(zip(MANAGERS, row[1:], strict=True)) for row in _ROWS}

#: Features that are no op: what they need, and what for.
FEATURES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "compiling host libraries": (("c++", "ninja"), "the first use of an op that no wheel or archive brought"),
    "compiling GPU code": (("nvrtc",), "the first use on a GPU without a ready part; comes with torch for CUDA"),
    "install.sh on many hosts": (("pdsh", "ssh"), "copying in parallel; without pdsh it goes by ssh and scp"),
    "extra 1bit_mpi": (("mpi",), "building mpi4py where the index has no wheel"),
}

_COMMANDS: Mapping[str, str] = {
    "apt": "apt-get update && apt-get install -y {}",
    "dnf": "dnf install -y {}",
    "zypper": "zypper install -y {}",
    "pacman": "pacman -S --noconfirm {}",
    "apk": "apk add {}",
    "conda": "conda install -y -c conda-forge {}",
    "pip": "{python} -m pip install {}",
}


def install_command(needs: Sequence[str], at: Distribution) -> str:
    """One line to paste that installs what is needed here; empty where nobody has packages of these names.

    A conda environment's own packages come first, then the package index, then the distribution's.

    >>> install_command(["libaio"], Distribution("debian", "Debian 12", "apt", root=True))
    'apt-get update && apt-get install -y libaio-dev'
    """
    order = ["conda"] if at.conda else []
    order += ["pip", *([at.manager] if at.manager else [])]
    by_manager: dict[str, list[str]] = {}
    for need in needs:
        names = PACKAGES.get(need, {})
        manager = next((m for m in order if names.get(m)), None)
        if manager is not None:
            by_manager.setdefault(manager, []).append(names[manager])
    commands = []
    for manager in order:
        if manager in by_manager:
            line = _COMMANDS[manager].replace("{python}", at.python).format(" ".join(by_manager[manager]))
            commands.append(_as_root(line, at) if manager not in ("conda", "pip") else line)
    return " && ".join(commands)


def _as_root(line: str, at: Distribution) -> str:
    if at.root:
        return line
    return " && ".join(f"sudo {part}" for part in line.split(" && "))


def names_for(need: str, at: Distribution) -> str:
    """What a need is called here, for tables; empty where the table does not know."""
    names = PACKAGES.get(need, {})
    order = [*(["conda"] if at.conda else []), "pip", *([at.manager] if at.manager else [])]
    return next((f"{m}: {names[m]}" for m in order if names.get(m)), "")
