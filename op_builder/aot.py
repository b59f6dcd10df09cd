"""Building ahead of time: which ops and targets the environment asks for, by which compilers, into one store.

Follows the same plan as the run-time build. What was asked for by name and cannot be built is an error; what was not is
listed with the reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .choose import DeviceCompiler, choose_device_compiler, device_compilers
from .compile import build, fetch_nvrtc
from .errors import CompileFailed, CompilerMissing, OpBuildError, OpsError, UsageError
from .files import FILES
from .host import HostFacts, detect
from .matrix import dotted, load
from .plan import CompilePlan, PartPlan, package_version, plan_device, plan_host
from .process import check_python, process_state
from .settings import Settings
from .spec import OpSpec, all_specs
from .store import Store, jit_store
from .targets import Target, parse_arch_list, ship_set, supported_by
from .toolchain import Toolchain, discover, discover_gpu

HOME = Path(__file__).resolve().parent.parent
Say = Callable[[str], None]
Release = tuple[int, int]


@dataclass(frozen=True)
class Built:
    """A part that was built."""

    op: str
    variant: str
    compiler: str
    path: str
    size: int


@dataclass(frozen=True)
class Skipped:
    """An op, or one GPU target of it, that was not built."""

    op: str
    variant: str
    why: str


@dataclass
class Report:
    """What a build ahead of time did."""

    built: list[Built] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> Mapping[str, object]:
        """JSON-serialisable."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: what is there, what is not and why."""
        out = [f"built    {b.op} {b.variant} by {b.compiler}, {b.size} bytes" for b in self.built]
        out += [f"skipped  {s.op}{' ' + s.variant if s.variant else ''}: {s.why}" for s in self.skipped]
        return out + [f"note     {note}" for note in self.notes]


def asked_ops(settings: Settings, specs: Mapping[str, OpSpec], ops: Sequence[str] | None = None) -> dict[str, bool]:
    """The ops to build, by name; True where it was asked for by name, so that not building it is an error.

    Args:
        settings: ``DS_BUILD_OPS``, ``DS_BUILD_<OP>``, or an arch list alone.
        specs: the registry.
        ops: names given by the caller instead of the environment.
    """
    if ops is not None:
        unknown = sorted(set(ops) - set(specs))
        if unknown:
            raise UsageError(f"no op is named {unknown[0]!r}", f"the registry holds {', '.join(specs)}", "")
        return {name: True for name in specs if name in ops}
    asked: dict[str, bool] = {}
    for name in specs:
        by_name = settings.build_op.get(name)
        if by_name or (by_name is None and (settings.build_ops or (settings.archs_ask and specs[name].device))):
            asked[name] = bool(by_name)
    return asked


def targets_for(
    spec: OpSpec, settings: Settings, arch_list: str | None = None, native: Sequence[tuple[int, int]] = ()
) -> dict[Target, Release | None]:
    """GPU targets of an op, in numeric order, each with the CUDA release that has to make it (None: any).

    The user's list if there is one; else the shipped set, one part per architecture by the oldest release that has it,
    so that every driver since that release's own can load it.
    """
    if not spec.device:
        return {}
    text = arch_list or settings.arch_list
    wanted: dict[Target, Release | None]
    wanted = dict.fromkeys(parse_arch_list(text, native=native)) if text else dict(ship_set())
    lowest = tuple(spec.min_sm) if spec.min_sm else (0, 0)
    return {target: release for target, release in wanted.items() if target.capability >= lowest}


def build_ahead(
    out_root: Path,
    settings: Settings,
    host: HostFacts | None = None,
    ops: Sequence[str] | None = None,
    archs: str | None = None,
    say: Say | None = None,
    *,
    home: Path = HOME,
    specs: Mapping[str, OpSpec] | None = None,
    toolchain: Toolchain | None = None,
    fetch: bool = True,
) -> Report:
    """Build what the environment asks for into the store ``out_root``.

    Args:
        out_root: becomes a store of parts and nothing else.
        settings: the environment.
        host: the platform to build for; default: this machine.
        ops: names instead of ``DS_BUILD_*``.
        archs: an arch list instead of ``TORCH_CUDA_ARCH_LIST``.
        say: told one line per part that is compiled.
        home: holds ``csrc``.
        specs: the registry.
        toolchain: the compilers; default: those of this machine.
        fetch: whether a compiler that is missing may be installed into a private folder.

    Raises:
        OpBuildError: an op asked for by name cannot be built, or none of all could be.
        HostUnsupported: a 32-bit Python.
        ArchListError: the list names something unknown.
    """
    check_python(process_state())
    specs = all_specs() if specs is None else specs
    host = detect(settings.env) if host is None else host
    toolchain = discover(settings, host) if toolchain is None else toolchain
    asked, report = asked_ops(settings, specs, ops), Report()
    for name, switch in settings.build_op.items():
        if not switch and ops is None:
            report.skipped.append(Skipped(name, "", f"{specs[name].env_var}=0"))
    work = _Work(out_root, settings, host, home, report, say, fetch, toolchain)
    native = tuple(device.capability for device in host.devices)
    for name, required in asked.items():
        try:
            work.build_op(specs[name], targets_for(specs[name], settings, archs, native), required)
        except (CompileFailed, CompilerMissing) as exc:
            if required:
                raise _cannot(specs[name], exc) from exc
            report.skipped.append(Skipped(name, "", _one_line(exc)))
    work.tidy()
    buildable = any(not specs[name].python_only for name in asked)
    if buildable and not report.built and not settings.archs_ask:
        why = "; ".join(f"{s.op}: {s.why}" for s in report.skipped)
        raise OpBuildError("DS_BUILD_OPS=1 built no op at all", why, "unset DS_BUILD_OPS, or cure the reasons above")
    return report


def _cannot(spec: OpSpec, exc: OpsError) -> OpBuildError:
    what = f"op {spec.name} was asked for and cannot be built"
    fix = f"{exc.fix}; or {spec.env_var}=0 to leave it out" if exc.fix else f"{spec.env_var}=0 leaves it out"
    return OpBuildError(what, f"{exc.what}: {exc.why}", fix)


def _one_line(exc: OpsError) -> str:
    return f"{exc.what}: {exc.why.splitlines()[0] if exc.why else ''}"


@dataclass
class _Work:
    """One build ahead of time under way."""

    out_root: Path
    settings: Settings
    host: HostFacts
    home: Path
    report: Report
    say: Say | None
    fetch: bool
    toolchain: Toolchain
    fetched: dict[Release, OpsError | None] = field(default_factory=dict)

    def build_op(self, spec: OpSpec, targets: Mapping[Target, Release | None], required: bool) -> None:
        if spec.python_only:
            self.report.notes.append(f"{spec.name} is Python only: nothing to compile")
            return
        csrc, version = self.home / "csrc", package_version(self.home)
        parts: list[PartPlan] = []
        if spec.host:
            parts.append(plan_host(spec, self.toolchain, self.settings, self.host, csrc, version))
        for target, release in targets.items():
            try:
                compiler = self.compiler(target, release)
            except CompilerMissing as exc:
                if required:
                    raise
                self.report.skipped.append(Skipped(spec.name, target.variant, _one_line(exc)))
                continue
            parts.append(plan_device(spec, target, compiler, csrc, version))
        store = Store(self.out_root, "package", logs=jit_store(self.settings).root / ".logs")
        done = build(CompilePlan(tuple(parts)), store, self.settings, self.say, self.toolchain.ninja)
        for part in done:
            found = part.manifest
            path = part.path.relative_to(self.out_root).as_posix()
            self.report.built.append(Built(found.op, found.variant, found.compiler, path, found.size))

    def compiler(self, target: Target, release: Release | None) -> DeviceCompiler:
        """The compiler for a target: of that release if one is asked for, brought in if need be."""
        driver = self.host.driver.cuda if self.host.driver is not None and release is None else None
        try:
            return choose_device_compiler(target, self.toolchain, release=release, driver_cuda=driver)
        except CompilerMissing as missing:
            wanted = release or next((r for r in load().cuda if supported_by(target, r)), None)  # the oldest one
            failed: OpsError | None = missing
            if wanted is not None and self.fetch:
                failed = self._bring(wanted)
            if failed is None:
                return choose_device_compiler(target, self.toolchain, release=wanted)
            # Without that very release, another one's part serves: it only asks more of the driver.
            try:
                compiler = choose_device_compiler(target, self.toolchain)
            except CompilerMissing:
                raise CompilerMissing(missing.what, f"{missing.why}; {failed.why}", missing.fix) from failed
            asked_for = f" instead of {dotted(wanted)}" if wanted is not None else ""
            note = f"{target.variant} by CUDA {dotted(compiler.version)}{asked_for}: {failed.why}"
            self.report.notes.append(note.replace("\n", " "))
            return compiler

    def _bring(self, release: Release) -> OpsError | None:
        """Install a release's NVRTC below the JIT store; what went wrong, or None."""
        if release not in self.fetched:
            folder = jit_store(self.settings).root / ".compilers" / f"nvrtc-{dotted(release)}"
            self.fetched[release] = None
            if not (folder / "nvidia").is_dir():
                if self.say is not None:
                    self.say(f"fetching {load().cuda[release].nvrtc}")
                try:
                    fetch_nvrtc(load().cuda[release].nvrtc, folder, self.settings)
                except OpsError as exc:
                    self.fetched[release] = exc
            gpu = discover_gpu(self.settings, self.host, paths=[str(folder)])
            known = {n.library for n in self.toolchain.nvrtc}
            found = tuple(n for n in gpu.nvrtc if n.version == release and n.library not in known)
            if found:
                self.toolchain = replace(self.toolchain, nvrtc=(*self.toolchain.nvrtc, *found))
        return self.fetched[release]

    def tidy(self) -> None:
        """Leave parts and nothing else: what follows packs the folder up."""
        for name in (".work", ".locks"):
            FILES.remove_tree(self.out_root / name)


def build_requires(settings: Settings, specs: Mapping[str, OpSpec] | None = None) -> tuple[str, ...]:
    """Requirements that bring the compilers this build lacks: at most one NVRTC release per distribution name.

    One environment holds one release of a distribution, so of those that a set of targets could use, the lowest that
    serves the most of them is asked for.
    """
    specs = all_specs() if specs is None else specs
    host = detect(settings.env)
    native = tuple(device.capability for device in host.devices)
    wanted: set[Target] = set()
    for name in asked_ops(settings, specs):
        wanted |= set(targets_for(specs[name], settings, None, native))
    if not wanted:
        return ()
    here = discover_gpu(settings, host, paths=sys.path)
    lacking = {t for t in wanted if not any(c.targets(t) for c in device_compilers(here))}
    return tuple(_requirements(lacking))


def _requirements(lacking: Iterable[Target]) -> list[str]:
    rows: dict[str, list[tuple[Release, str]]] = {}
    for release, row in load().cuda.items():
        rows.setdefault(re.split(r"[=<>~! ]", row.nvrtc, maxsplit=1)[0], []).append((release, row.nvrtc))
    out, left = [], set(lacking)
    for candidates in rows.values():
        served = {release: {t for t in left if supported_by(t, release)} for release, _ in candidates}
        release, requirement = max(candidates, key=lambda c: (len(served[c[0]]), [-n for n in c[0]]))
        if served[release]:
            out.append(requirement)
            left -= served[release]
    return out
