"""GPUs and driver of this machine through NVML: no CUDA context, so a process that forks later is unharmed.

Which devices CUDA will see follows from ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``. NVML counts in PCI order,
CUDA by default fastest first: among unlike GPUs the ordinals here are a plan, to be confirmed with the driver by UUID.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import matrix

# Where the driver's libraries live under WSL, which no linker cache lists.
_WSL = "usr/lib/wsl/lib"


@dataclass(frozen=True)
class Driver:
    """The GPU driver: its version (``580.159.04``) and the newest CUDA version it serves (``(13, 0)``)."""

    version: str
    cuda: tuple[int, int] | None

    @property
    def branch(self) -> tuple[int, ...]:
        """The version as numbers, ``(580, 159, 4)``; ``()`` where it is not known."""
        numbers = re.findall(r"\d+", self.version)
        return tuple(int(n) for n in numbers)


@dataclass(frozen=True)
class Device:
    """One GPU (or MIG instance) as CUDA is expected to number it.

    Attributes:
        ordinal: the CUDA ordinal expected in this process.
        uuid: ``GPU-...`` or ``MIG-...``; how to recognise the device with the driver.
        name: marketing name.
        capability: compute capability.
        memory_bytes: size of its memory in bytes.
        tegra: a system-on-chip.
        pci: PCI bus id; ``""`` where there is none.
        mig: whether it is a MIG instance.
    """

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    tegra: bool = False
    pci: str = ""
    mig: bool = False


@dataclass(frozen=True)
class Gpus:
    """What NVML told. ``certain`` is False where CUDA may number the devices otherwise (unlike GPUs)."""

    driver: Driver | None
    devices: tuple[Device, ...]
    certain: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Physical:
    device: Device
    speed: float
    instances: tuple[Device, ...]
    mig_on: bool


def read_gpus(env: Mapping[str, str], root: Path = Path("/"), nvml: Any = None) -> Gpus:
    """Driver and visible devices. Never raises: what could not be read is a note.

    Args:
        env: environment variables.
        root: where the file system starts (tests pass a folder).
        nvml: a module with ``pynvml``'s functions; by default ``pynvml`` itself.
    """
    notes: list[str] = []
    try:
        module = nvml if nvml is not None else _pynvml(root)
        with _session(module):
            driver = _driver(module, notes)
            physical = list(_physical(module, notes))
    except Exception as exc:
        return Gpus(driver_without_nvml(root), (), True, (*notes, *why_no_nvml(exc, env, root)))
    visible, certain = visible_devices(physical, env, notes)
    return Gpus(driver, visible, certain, tuple(notes))


def _pynvml(root: Path) -> Any:
    under_wsl = root / _WSL / "libnvidia-ml.so.1"
    if under_wsl.is_file():
        # Once loaded by path, the binding's own request by soname finds this copy.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(under_wsl), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("pynvml")


@contextlib.contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _driver(nvml: Any, notes: list[str]) -> Driver:
    cuda: tuple[int, int] | None = None
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        cuda = (number // 1000, number % 1000 // 10)
    except Exception as exc:
        notes.append(f"NVML does not tell the CUDA version of the driver: {exc}")
    return Driver(_text(nvml.nvmlSystemGetDriverVersion()), cuda)


def _physical(nvml: Any, notes: list[str]) -> Iterator[_Physical]:
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            yield _one(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        except Exception as exc:
            notes.append(f"NVML cannot read GPU {index}: {exc}")


def _one(nvml: Any, handle: Any) -> _Physical:
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    capability = (int(capability[0]), int(capability[1]))
    device = Device(
        ordinal=-1,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=capability,
        memory_bytes=int(_quiet(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total, 0)),
        tegra=matrix.load().is_tegra(capability),
        pci=_text(_quiet(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId, "")).lower(),
    )
    cores = float(_quiet(lambda: nvml.nvmlDeviceGetNumGpuCores(handle), 0))
    clock = float(_quiet(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, 1), 0))  # 1: the clock of the SMs, MHz
    mig_on = _quiet(lambda: int(nvml.nvmlDeviceGetMigMode(handle)[0]), 0) == 1
    return _Physical(device, cores * clock, tuple(_instances(nvml, handle, device)) if mig_on else (), mig_on)


def _instances(nvml: Any, handle: Any, parent: Device) -> Iterator[Device]:
    for index in range(int(_quiet(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0))):
        part = _quiet(functools.partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index), None)
        if part is None:  # an index without an instance
            continue
        size = int(_quiet(lambda part=part: nvml.nvmlDeviceGetMemoryInfo(part).total, 0))
        yield replace(parent, uuid=_text(nvml.nvmlDeviceGetUUID(part)), memory_bytes=size, mig=True)


def _quiet(ask: Any, default: Any) -> Any:
    with contextlib.suppress(Exception):
        return ask()
    return default


def visible_devices(
    physical: Sequence[_Physical], env: Mapping[str, str], notes: list[str]
) -> tuple[tuple[Device, ...], bool]:
    """Devices CUDA will see, in its order, and whether that order is certain.

    A variable that is set and empty, or begins with an unknown entry, hides every device; the first unknown entry
    ends the list, as in the driver.
    """
    by_pci = sorted(physical, key=lambda p: p.device.pci)
    certain = True
    if env.get("CUDA_DEVICE_ORDER", "") == "PCI_BUS_ID":
        ordered = by_pci
    else:
        ordered = sorted(by_pci, key=lambda p: -p.speed)
        certain = len({(p.device.name, p.device.capability) for p in physical}) <= 1
    choice = env.get("CUDA_VISIBLE_DEVICES")
    chosen = list(_default(ordered)) if choice is None else list(_chosen(choice, ordered, notes))
    if not certain:
        notes.append(
            "the GPUs are unlike and CUDA orders them fastest first: ordinals are confirmed with the driver by UUID; "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID makes them certain"
        )
    return tuple(replace(d, ordinal=i) for i, d in enumerate(chosen)), certain


def _default(ordered: Sequence[_Physical]) -> Iterator[Device]:
    # A process uses one MIG instance at most, and whole GPUs of the same machine only where none is split.
    for physical in ordered:
        if physical.mig_on and physical.instances:
            yield physical.instances[0]
            return
    for physical in ordered:
        if not physical.mig_on:
            yield physical.device


def _chosen(choice: str, ordered: Sequence[_Physical], notes: list[str]) -> Iterator[Device]:
    seen: set[str] = set()
    for entry in (e.strip() for e in choice.split(",")):
        device = _find(entry, ordered)
        if device is None:
            if entry not in ("", "-1", "NoDevFiles", "void", "none"):
                notes.append(f"CUDA_VISIBLE_DEVICES={choice!r}: {entry!r} names no device; it and the rest are hidden")
            return
        if device.uuid in seen:
            notes.append(f"CUDA_VISIBLE_DEVICES={choice!r} names {entry!r} twice")
            return
        seen.add(device.uuid)
        yield device
        if device.mig:
            return


def _find(entry: str, ordered: Sequence[_Physical]) -> Device | None:
    if entry.isascii() and entry.isdigit():
        index = int(entry)
        if index >= len(ordered):
            return None
        physical = ordered[index]
        return (physical.instances[0] if physical.instances else None) if physical.mig_on else physical.device
    if not entry.upper().startswith(("GPU-", "MIG-")):
        return None
    known = [d for p in ordered for d in (*([] if p.mig_on else [p.device]), *p.instances)]
    matching = [d for d in known if d.uuid.lower().startswith(entry.lower())]
    return matching[0] if len(matching) == 1 else None


def driver_without_nvml(root: Path = Path("/")) -> Driver | None:
    """The driver's version from the kernel module's own file; None where no driver is loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return Driver(match[1], None) if match else None


def why_no_nvml(exc: BaseException, env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Why NVML does not answer here, most telling reason first, with what to do."""
    notes: list[str] = []
    cards = [p.name for p in (root / "dev").glob("nvidia[0-9]*")] if (root / "dev").is_dir() else []
    if is_jetson(root):
        notes.append("this is a Jetson, where NVML tells little: the device is asked when a CUDA context exists")
    elif (root / "dev/dxg").exists():
        notes.append("WSL: NVML comes with the Windows driver in /usr/lib/wsl/lib; update that driver (wsl --update)")
    elif cards:
        asked = env.get("NVIDIA_DRIVER_CAPABILITIES", "")
        notes.append(
            f"GPU device files exist ({', '.join(sorted(cards))}) but NVML does not answer: a container needs the "
            f"driver capability `utility` (NVIDIA_DRIVER_CAPABILITIES={asked or 'unset'}; use compute,utility)"
        )
    if isinstance(exc, ImportError):
        notes.append("the module pynvml is missing: pip install nvidia-ml-py")
    elif "mismatch" in str(exc).lower():
        notes.append(f"NVML: {exc}; the driver was updated while its old kernel module is loaded: reboot")
    else:
        notes.append(f"no GPU through NVML: {exc}" if str(exc) else f"no GPU through NVML: {type(exc).__name__}")
    return notes


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether the machine is an NVIDIA system-on-chip board."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        model = (root / "proc/device-tree/model").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False
    return "nvidia" in model and any(word in model for word in ("jetson", "orin", "thor", "tegra", "xavier"))
