"""The resolver's rules for GPU parts: what runs where, and what this driver loads. Pure, like the rest of it."""

from __future__ import annotations

from .choose import choose_device_compiler, compiler_name
from .errors import CompilerMissing
from .gpus import Device
from .host import HostFacts
from .matrix import dotted, load
from .resolve import BUILD, EXACT, FAMILY, OLDER, PTX, REBUILD, SPECIFIC, Accepted, Rejected
from .spec import OpSpec
from .store import Part
from .targets import Target, why_not
from .toolchain import Toolchain

_UPDATE = "update the NVIDIA driver"


def judge(spec: OpSpec, host: HostFacts, device: Device, part: Part) -> Accepted | Rejected:
    """The verdict on a GPU part that is ours, whole and of the right sources."""
    found, name = part.manifest, str(part.path)
    target = Target.from_variant(found.variant)
    if too_old := below_minimum(spec, device):
        return Rejected(name, "arch", too_old, "", part)
    if why := why_not(target, device.capability, device.tegra):
        axis = "tegra" if "system-on-chip" in why else "arch"
        return Rejected(name, axis, why, "", part)
    lacking = sorted(set(spec.kernels) - set(found.kernels)) if found.kernels else []
    if lacking:
        return Rejected(name, "sources", f"lacks the kernels {', '.join(lacking)}", REBUILD, part)
    refused = _driver_refuses(host, target, part)
    if refused is not None:
        return refused
    return Accepted(name, _rank(target, device), part, target.number)


def _rank(target: Target, device: Device) -> int:
    if target.kind == "ptx":
        return PTX
    if target.suffix:
        return SPECIFIC if target.suffix == "a" else FAMILY
    return EXACT if target.capability == device.capability else OLDER


def _driver_refuses(host: HostFacts, target: Target, part: Part) -> Rejected | None:
    """What the driver says to a part; None also where nobody asked it yet: it answers itself when a part is loaded."""
    found, name = part.manifest, str(part.path)
    if why := _driver_too_old(host):
        return Rejected(name, "driver", why, _UPDATE, part)
    cuda = host.driver.cuda if host.driver is not None else None
    branch = host.driver.branch if host.driver is not None else ()
    release = found.compiler_release
    if target.kind == "ptx":
        isa = found.ptx_isa
        if cuda is not None and isa is not None and isa > (reads := load().ptx_isa(cuda)):
            why = f"PTX version {dotted(isa)}; a driver of CUDA {dotted(cuda)} reads up to {dotted(reads)}"
            return Rejected(name, "ptx-isa", why, _UPDATE, part)
    elif cuda is not None and release is not None and release[0] > cuda[0]:
        why = f"made by CUDA {dotted(release)}; a driver of CUDA {dotted(cuda)} loads no newer major"
        return Rejected(name, "driver", why, _UPDATE, part)
    elif branch and release is not None and branch < (floor := load().driver_floor(release, target.capability)):
        why = f"machine code of CUDA {dotted(release)} for {target.code} needs driver {dotted(floor)}"
        return Rejected(name, "driver", why, _UPDATE, part)
    return None


def _driver_too_old(host: HostFacts) -> str:
    cuda = host.driver.cuda if host.driver is not None else None
    if cuda is None or cuda >= (12, 0):
        return ""
    return f"the driver serves CUDA {dotted(cuda)}; loading GPU parts needs 12.0 (driver 525)"


def below_minimum(spec: OpSpec, device: Device) -> str:
    """Why the op does not support a device; empty where it does."""
    if spec.min_sm is None or device.capability >= tuple(spec.min_sm):
        return ""
    return f"op {spec.name} needs compute capability {dotted(spec.min_sm)}, the device has {dotted(device.capability)}"


def judge_build(spec: OpSpec, host: HostFacts, device: Device, toolchain: Toolchain) -> Accepted | Rejected:
    """Whether a compiler here makes something that this device runs, and which."""
    if too_old := below_minimum(spec, device):
        return Rejected("build here", "arch", too_old)
    if why := _driver_too_old(host):
        return Rejected("build here", "driver", why, _UPDATE)
    cuda = host.driver.cuda if host.driver is not None else None
    first: CompilerMissing | None = None
    # A compiler older than the device may still know an older device of its major, whose code runs there too.
    for minor in range(device.capability[1], -1, -1):
        target = Target(device.capability[0], minor)
        if why_not(target, device.capability, device.tegra):
            continue
        try:
            compiler = choose_device_compiler(target, toolchain, driver_cuda=cuda)
        except CompilerMissing as exc:
            first = first or exc
            continue
        return Accepted(f"build {target.variant} here with {compiler_name(compiler)}", BUILD, None, 0, compiler, target)
    assert first is not None  # the device's own target runs on it, so at least one was asked for
    return Rejected(f"build sm{device.capability[0]}{device.capability[1]} here", "compiler", first.why, first.fix)
