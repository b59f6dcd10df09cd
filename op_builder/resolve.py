"""Which part fits this machine: host facts x parts -> one choice, and for every other candidate the reason why not.

Pure. The loader, the report, image tags and conda strings all ask here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import JitForbidden, NoMatchingPart, OpsError
from .spec import OpSpec
from .store import ORIGINS, Part, Unreadable

if TYPE_CHECKING:  # looking at compilers is slow to import, and a part found ready needs none
    from .choose import DeviceCompiler
    from .gpus import Device
    from .host import HostFacts
    from .targets import Target
    from .toolchain import HostCompiler, Toolchain

#: Why a candidate is refused. The last two are about building one.
AXES = (
    *("platform", "glibc", "musl", "sources", "abi", "arch", "driver", "ptx-isa", "tegra"),
    *("quarantined", "corrupt", "user-flags", "needs", "jit", "compiler"),
)

# Best first. A host library has no arch: it is EXACT, or PLAIN where the user now asks for flags it lacks.
EXACT, PLAIN, SPECIFIC, FAMILY, OLDER, BUILD, PTX = range(7)
_RANK_NAMES = {
    EXACT: "exact",
    PLAIN: "without the user's flags",
    SPECIFIC: "architecture-specific, exact",
    FAMILY: "same family",
    OLDER: "older machine code of the same major",
    BUILD: "built here",
    PTX: "PTX, compiled by the driver at load",
}
REBUILD = "install the package again, or unset DS_JIT=0 so that it is built here"


@dataclass(frozen=True)
class Want:
    """What else a part must agree with.

    Attributes:
        source_digest: of the sources installed here.
        abi: of the TVM-FFI installed here; host parts only.
        user_flags: the user's flags now; a part built with other ones is not theirs.
        jit: whether building at run time is allowed.
        quarantined: reasons by sha256 of parts this host could not load.
        corrupt: reasons by path of parts that failed verification.
        missing: system libraries the op needs and that are absent: name -> (why, fix).
    """

    source_digest: str
    abi: str = ""
    user_flags: tuple[str, ...] = ()
    jit: bool = True
    quarantined: Mapping[str, str] = field(default_factory=dict)
    corrupt: Mapping[Path, str] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Accepted:
    """A candidate that runs here. ``part`` is None for building one: then ``compiler`` and, on a GPU, ``target``.

    Among equal ranks the higher ``closeness`` (number of the architecture) wins.
    """

    name: str
    rank: int
    part: Part | None = None
    closeness: int = 0
    compiler: DeviceCompiler | HostCompiler | None = None
    target: Target | None = None

    @property
    def why(self) -> str:
        """What kind of match it is."""
        return _RANK_NAMES[self.rank]


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not run here."""

    name: str
    axis: str
    why: str
    fix: str = ""
    part: Part | None = None


@dataclass(frozen=True)
class Resolution:
    """The choice and the trace.

    Attributes:
        op: the op's name.
        subject: what it was resolved for: the platform, or a device.
        choice: the best candidate, None where nothing fits.
        trace: every candidate's verdict, accepted ones first, best first.
    """

    op: str
    subject: str
    choice: Accepted | None
    trace: tuple[Accepted | Rejected, ...]

    @property
    def action(self) -> str:
        """``load``, ``build`` or ``fail``."""
        if self.choice is None:
            return "fail"
        return "load" if self.choice.part is not None else "build"

    def explain(self) -> str:
        """Every candidate with its verdict and reason, one a line."""
        lines = [f"op {self.op} on {self.subject}: {self.action}"]
        for verdict in self.trace:
            if isinstance(verdict, Accepted):
                chosen = "chosen" if verdict is self.choice else "also fits"
                lines.append(f"  + {verdict.name}: {chosen} ({verdict.why})")
            else:
                lines.append(f"  - {verdict.name}: {verdict.axis}: {verdict.why}")
        if not self.trace:
            lines.append("  no part was found and none can be built")
        return "\n".join(lines)

    def error(self) -> OpsError:
        """The typed error of a resolution that failed; its ``why`` is the trace."""
        rejected = [v for v in self.trace if isinstance(v, Rejected)]
        forbidden = next((v for v in rejected if v.axis == "jit"), None)
        if forbidden is not None:
            what = f"op {self.op}: no part fits {self.subject}, and DS_JIT=0 forbids building one"
            return JitForbidden(what, self.explain(), forbidden.fix)
        # The cure nearest to working: a compiler to install, else whatever the best candidate lacks.
        fix = next((v.fix for v in reversed(rejected) if v.fix), "")
        return NoMatchingPart(f"op {self.op}: no part fits {self.subject}", self.explain(), fix)


def resolve(
    spec: OpSpec,
    host: HostFacts,
    device: Device | None,
    parts: Sequence[Part | Unreadable],
    toolchain: Toolchain | None,
    want: Want,
) -> Resolution:
    """Choose a part of an op.

    Args:
        spec: the op.
        host: the machine; ``host.driver`` is the driver that has to load GPU code.
        device: the GPU; None: the host library is asked for.
        parts: every part found, in any order.
        toolchain: the compilers here; None: nobody looked yet, and building is no candidate.
        want: what else must agree.

    Returns:
        The same for every order of ``parts``.
    """
    verdicts: list[Accepted | Rejected] = []
    for part in parts:
        if isinstance(part, Unreadable):
            fix = f"delete the folder {part.path.parent}"
            verdicts.append(Rejected(str(part.path), "corrupt", part.why, fix))
        elif part.manifest.op == spec.name and part.manifest.kind == ("host" if device is None else "device"):
            verdicts.append(_judge(spec, host, device, part, want))
    if toolchain is not None:
        verdicts.append(_judge_build(spec, host, device, toolchain, want))
    order = sorted(verdicts, key=_preference)
    best = order[0] if order and isinstance(order[0], Accepted) else None
    return Resolution(spec.name, subject_of(host, device), best, tuple(order))


def subject_of(host: HostFacts, device: Device | None) -> str:
    """How messages name what a part is for."""
    if device is None:
        libc = f" ({host.libc} {_dotted(host.libc_version)})" if host.libc_version else ""
        return host.platform + libc
    driver = f", driver for CUDA {_dotted(host.driver.cuda)}" if host.driver and host.driver.cuda else ""
    name = f" {device.name}" if device.name else ""
    return f"GPU {device.ordinal}{name} (compute capability {_dotted(device.capability)}{driver})"


def _preference(verdict: Accepted | Rejected) -> tuple[int, int, int, tuple[int, ...], str, str]:
    """Total order: kind of match, closeness, place of the store, newest compiler, then key and path."""
    if isinstance(verdict, Rejected):
        return 100 + AXES.index(verdict.axis), 0, 0, (), "", verdict.name
    part = verdict.part
    if part is None:
        return verdict.rank, 0, len(ORIGINS), (), "", verdict.name
    newest = tuple(-n for n in part.manifest.compiler_release or ())
    place = ORIGINS.index(part.origin)
    return verdict.rank, -verdict.closeness, place, newest, part.manifest.key, verdict.name


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _judge(spec: OpSpec, host: HostFacts, device: Device | None, part: Part, want: Want) -> Accepted | Rejected:
    found = part.manifest
    name = str(part.path)
    if part.path in want.corrupt:
        return Rejected(name, "corrupt", want.corrupt[part.path], f"delete the folder {part.path.parent}", part)
    if found.sha256 in want.quarantined:
        return Rejected(name, "quarantined", want.quarantined[found.sha256], "", part)
    if found.source_digest != want.source_digest:
        why = f"made from sources {found.source_digest[:12]}, here are {want.source_digest[:12]}"
        return Rejected(name, "sources", why, REBUILD, part)
    for need, (why, fix) in sorted(want.missing.items()):
        return Rejected(name, "needs", f"{need}: {why}", fix, part)
    if device is not None:
        from .resolve_device import judge

        return judge(spec, host, device, part)
    return _judge_host(host, part, want)


def _judge_host(host: HostFacts, part: Part, want: Want) -> Accepted | Rejected:
    found, name = part.manifest, str(part.path)
    if found.platform != host.platform:
        from .faults import part_of_another_platform

        problem = part_of_another_platform(found.platform, host.platform)
        return Rejected(name, "platform", problem.why, problem.fix, part)
    is_musl = any("musl" in library for library in found.needed)
    if host.libc == "musl" and not is_musl:
        return Rejected(name, "musl", "made for glibc, this system has musl", REBUILD, part)
    if host.libc == "glibc" and is_musl:
        return Rejected(name, "musl", "made for musl, this system has glibc", REBUILD, part)
    if found.glibc and host.glibc is not None and tuple(found.glibc) > host.glibc:
        why = f"needs glibc {_dotted(found.glibc)}, this system has {_dotted(host.glibc)}"
        return Rejected(name, "glibc", why, REBUILD, part)
    if found.abi != want.abi:
        return Rejected(
            name, "abi", f"made for {found.abi}, here is {want.abi}", "pip install --upgrade deepspeed", part
        )
    if found.user_flags and found.user_flags != want.user_flags:
        why = f"built with the user's flags {' '.join(found.user_flags)!r}, now they are {' '.join(want.user_flags)!r}"
        return Rejected(name, "user-flags", why, "", part)
    return Accepted(name, EXACT if found.user_flags == want.user_flags else PLAIN, part)


def _judge_build(
    spec: OpSpec, host: HostFacts, device: Device | None, toolchain: Toolchain, want: Want
) -> Accepted | Rejected:
    name = "build here"
    for need, (why, fix) in sorted(want.missing.items()):
        return Rejected(name, "needs", f"{need}: {why}", fix)
    if device is None:
        verdict = _build_host(spec, toolchain)
    else:
        from .resolve_device import judge_build

        verdict = judge_build(spec, host, device, toolchain)
    if isinstance(verdict, Accepted) and not want.jit:
        return Rejected(verdict.name, "jit", "possible, and forbidden by DS_JIT=0", "unset DS_JIT")
    return verdict


def _build_host(spec: OpSpec, toolchain: Toolchain) -> Accepted | Rejected:
    from .choose import compiler_name

    if toolchain.host is not None and toolchain.ffi is not None and toolchain.ninja is not None:
        return Accepted(f"build here with {compiler_name(toolchain.host)}", BUILD, compiler=toolchain.host)
    why = "; ".join(f"{p.what}: {p.why}" for p in toolchain.problems) or f"nothing here compiles {spec.name}"
    fix = next((p.fix for p in toolchain.problems if p.fix), "")
    return Rejected("build here", "compiler", why, fix)
