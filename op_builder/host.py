"""What machine this is: system, C library, CPU features, GPUs and driver. Looks, decides nothing, never raises."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gpus import Device, Driver

__all__ = ["HostFacts", "detect", "filesystem_of", "filesystem_type", "is_network_filesystem"]

_SYSTEMS = {"linux": "linux", "win32": "windows", "cygwin": "windows", "darwin": "macos"}
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}

# What the SIMD levels of csrc ask for; other flags of a CPU do not interest us.
_FEATURES = frozenset(
    {
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512_bf16",
        "neon",
        "sve",
    }
)
# Names of /proc/cpuinfo and of macOS's sysctl that differ from ours.
_ALIASES = {"asimd": "neon", "hw.optional.avx1_0": "avx", "hw.optional.avx2_0": "avx2"}
_SYSCTLS = (
    *("hw.optional.avx1_0", "hw.optional.avx2_0", "hw.optional.fma", "hw.optional.f16c", "hw.optional.sse4_2"),
    *("hw.optional.avx512f", "hw.optional.avx512bw", "hw.optional.avx512vl", "hw.optional.avx512dq"),
)
# Constants of IsProcessorFeaturePresent (winnt.h).
_WINDOWS_FEATURES = {38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f"}

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "9p"}
)


@dataclass(frozen=True)
class HostFacts:
    """The machine as the pure rooms see it.

    Attributes:
        system: ``linux``, ``windows`` or ``macos`` (or Python's own name of another system).
        machine: ``x86_64``, ``aarch64`` or the system's own name of another CPU.
        libc: ``glibc``, ``musl`` or ``""``.
        libc_version: ``(2, 36)``; ``()`` where it is not known.
        cpu_features: the SIMD features among those we use that CPU *and* operating system support.
        driver: the GPU driver, None without one.
        devices: GPUs this process is expected to see.
        notes: what could not be found out, and why.
        devices_certain: False where CUDA may number the devices otherwise.
        wsl: Linux under Windows.
    """

    system: str
    machine: str
    libc: str = ""
    libc_version: tuple[int, ...] = ()
    cpu_features: frozenset[str] = frozenset()
    driver: Driver | None = None
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    devices_certain: bool = True
    wsl: bool = False

    @property
    def platform(self) -> str:
        """Name of the platform in ``ci/matrix.toml`` and of host variants: ``linux-x86_64``."""
        return f"{self.system}-{self.machine}"

    @property
    def glibc(self) -> tuple[int, ...] | None:
        """Version of glibc, None on other C libraries."""
        return self.libc_version if self.libc == "glibc" and self.libc_version else None


def detect(
    env: Mapping[str, str],
    *,
    root: Path = Path("/"),
    system: str = sys.platform,
    machine: str | None = None,
    nvml: Any = None,
) -> HostFacts:
    """Look at the machine: no CUDA context, no subprocess. Never raises; what failed is in ``notes``.

    Args:
        env: environment variables (``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER``).
        root: where the file system starts.
        system: Python's ``sys.platform``.
        machine: ``platform.machine()``.
        nvml: a module with ``pynvml``'s functions.
    """
    notes: list[str] = []
    name = _SYSTEMS.get(system, system)
    raw = machine if machine is not None else _try(platform.machine, "", notes)
    cpu = _MACHINES.get(raw.lower(), raw.lower())
    libc, version = _try(lambda: c_library(root), ("", ()), notes) if name == "linux" else ("", ())
    features = _try(lambda: _features(name, cpu, root, notes), frozenset(), notes)
    from .gpus import read_gpus  # a process that only loads host parts asks no GPU

    gpus = read_gpus(env, root, nvml)
    return HostFacts(
        system=name,
        machine=cpu,
        libc=libc,
        libc_version=version,
        cpu_features=features,
        driver=gpus.driver,
        devices=gpus.devices,
        notes=(*notes, *gpus.notes),
        devices_certain=gpus.certain,
        wsl=name == "linux" and _try(lambda: is_wsl(root), False, notes),
    )


def _try(ask: Callable[[], Any], default: Any, notes: list[str]) -> Any:
    try:
        return ask()
    except Exception as exc:
        notes.append(f"{type(exc).__name__}: {exc}")
        return default


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this Linux runs under Windows."""
    if (root / "dev/dxg").exists():
        return True
    release = root / "proc/sys/kernel/osrelease"
    return release.is_file() and "microsoft" in _read(release).lower()


def c_library(root: Path = Path("/")) -> tuple[str, tuple[int, ...]]:
    """The C library of this process and its version; ``("", ())`` where it is neither glibc nor musl."""
    text = ""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if not text:
        with contextlib.suppress(OSError, AttributeError):
            ask = ctypes.CDLL(None).gnu_get_libc_version
            ask.restype = ctypes.c_char_p
            text = "glibc " + ask().decode("ascii", "replace")
    match = re.search(r"(\d+)\.(\d+)", text)
    if match:
        return "glibc", (int(match[1]), int(match[2]))
    return ("musl", ()) if any((root / "lib").glob("ld-musl-*.so.1")) else ("", ())


def _features(system: str, machine: str, root: Path, notes: list[str]) -> frozenset[str]:
    if system == "linux":
        return parse_cpuinfo(_read(root / "proc/cpuinfo"))
    if machine == "aarch64":
        return frozenset({"neon"})  # part of the architecture
    if system == "macos":
        return sysctl_features(_sysctl)
    if system == "windows":
        notes.append("Windows tells no finer AVX-512 sets; the host library asks the CPU itself")
        return windows_features(_processor_feature)
    return frozenset()


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Our features in the text of ``/proc/cpuinfo``: those of every core listed (the kernel hides what it cannot save).

    >>> sorted(parse_cpuinfo("flags : fpu avx avx2 fma"))
    ['avx', 'avx2', 'fma']
    """
    cores = re.findall(r"^(?:flags|Features)[ \t]*:(.*)$", text, re.MULTILINE)
    sets = [_ours(line.split()) for line in cores]
    return frozenset.intersection(*sets) if sets else frozenset()


def _ours(names: Iterable[str]) -> frozenset[str]:
    return frozenset(_ALIASES.get(n, n.removeprefix("hw.optional.")) for n in names) & _FEATURES


def sysctl_features(ask: Callable[[str], int | None]) -> frozenset[str]:
    """Our features by macOS's sysctl names; ``ask`` gives a value or None."""
    return _ours(n for n in _SYSCTLS if ask(n) == 1)


def _sysctl(name: str) -> int | None:
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    library = ctypes.CDLL(None)
    failed = library.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


def windows_features(ask: Callable[[int], bool]) -> frozenset[str]:
    """Our features by Windows' feature numbers. FMA and F16C have none; every CPU with AVX2 of this system has both."""
    found = {name for number, name in _WINDOWS_FEATURES.items() if ask(number)}
    return frozenset(found | ({"fma", "f16c"} if "avx2" in found else set()))


def _processor_feature(number: int) -> bool:
    windll: Any = vars(ctypes)["windll"]  # exists on Windows only
    return bool(windll.kernel32.IsProcessorFeaturePresent(number))


def filesystem_type(path: str, mountinfo: str) -> str:
    """Type of the file system an absolute path lies on, by the text of ``/proc/self/mountinfo``; ``""`` if none fits.

    The path need not exist. The deepest mount point wins; of two mounts on one point, the later.
    """
    best, found = -1, ""
    asked = PurePosixPath(path).parts
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        fields, types = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5 or not types[0]:
            continue
        point = PurePosixPath(_unescape(fields[4])).parts
        if len(point) >= best and asked[: len(point)] == point:
            best, found = len(point), types[0]
    return found


def _unescape(text: str) -> str:
    # The kernel writes blank, tab, newline and backslash as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def filesystem_of(path: Path, root: Path = Path("/")) -> str:
    """Type of the file system a path lies on (links followed as far as they exist); ``""`` where it cannot be told."""
    try:
        return filesystem_type(str(path.absolute().resolve()), _read(root / "proc/self/mountinfo"))
    except (OSError, RuntimeError):
        return ""


def is_network_filesystem(name: str) -> bool:
    """Whether locks and renames of this file system type cross machines (NFS and its kin)."""
    return name in _NETWORK or name in ("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs")
