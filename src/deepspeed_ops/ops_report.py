"""How every op would be loaded on this machine: the resolver's own answers, for the report to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deepspeed_ops.op_builder.distribution import Distribution, read_distribution
from deepspeed_ops.op_builder.errors import OpsError
from deepspeed_ops.op_builder.host import HostFacts, detect
from deepspeed_ops.op_builder.loader import Loader
from deepspeed_ops.op_builder.process import check_python, process_state
from deepspeed_ops.op_builder.settings import Settings
from deepspeed_ops.op_builder.spec import OpSpec, all_specs
from deepspeed_ops.op_builder.store import Part
from deepspeed_ops.report_cache import StoreLine, store_lines
from deepspeed_ops.report_data import OpLine, Way

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.resolve import Resolution
    from deepspeed_ops.op_builder.toolchain import Toolchain

T = TypeVar("T")


@dataclass
class Seen:
    """What was looked at."""

    host: HostFacts
    toolchain: Toolchain | None
    ops: list[OpLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    distribution: Distribution = field(default_factory=lambda: Distribution("", ""))
    stores: tuple[StoreLine, ...] = ()


def look(env: Mapping[str, str], home: Path) -> Seen:
    """Resolve every op for the host and for each GPU; builds and loads nothing.

    Args:
        env: the environment.
        home: the checkout, or the installed package.
    """
    from deepspeed_ops.op_builder.toolchain import Toolchain, discover

    host, problems = detect(env), list[str]()
    settings = _try(lambda: Settings.read(env), problems)
    found = None
    if settings is not None:
        found = _try(lambda: discover(settings, host), problems) or Toolchain()
    return resolve_all(settings, host, found, read_distribution(env), home, problems)


def resolve_all(
    settings: Settings | None,
    host: HostFacts,
    tools: Toolchain | None,
    at: Distribution,
    home: Path,
    problems: list[str],
) -> Seen:
    """Resolve every op for a machine that was looked at, or recorded.

    Args:
        settings: the environment; None where it could not be read.
        host: the machine.
        tools: its compilers.
        at: its distribution.
        home: the checkout, or the installed package.
        problems: what is to be said first.
    """
    _try(lambda: check_python(process_state()), problems)
    seen = Seen(host, tools, [], problems, at)
    if settings is None or tools is None:  # every op would fail with that very error
        seen.ops = [OpLine(name, False, False, note="see the warning above") for name in all_specs()]
        return seen
    loader = Loader(settings, home=home, host=host, tools=lambda *_: tools)
    seen.stores = store_lines(loader.stores, tuple(all_specs()))
    seen.ops = [_line(loader, spec, seen) for spec in all_specs().values()]
    return seen


def _try(ask: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return ask()
    except OpsError as exc:
        problems.append(str(exc))
        return None


def _line(loader: Loader, spec: OpSpec, seen: Seen) -> OpLine:
    """One op, resolved for the host and for each GPU."""
    if spec.python_only:
        return OpLine(spec.name, True, True, note="Python only: nothing to compile")
    try:
        resolutions = [loader.resolution(spec.name)]
        devices = seen.host.devices if spec.device else ()
        resolutions += [loader.resolution(spec.name, device) for device in devices]
    except OpsError as exc:
        return OpLine(spec.name, False, False, (Way("host library", "fail", exc.what, (exc.why,), exc.fix),))
    brought = [store for store in loader.stores if store.origin in ("package", "share")]
    ours = [p for store in brought for p in store.parts(spec.name) if isinstance(p, Part)]
    installed = any(p.manifest.kind == "host" and p.manifest.platform == seen.host.platform for p in ours)
    line = op_line(spec, resolutions, installed)
    return replace(line, ways=(*line.ways, *libraries_of(spec, loader.settings, seen.toolchain)))


def libraries_of(spec: OpSpec, settings: Settings, tools: Toolchain | None) -> tuple[Way, ...]:
    """What is here of the libraries that the op opens at run time; missing ones stop nothing.

    Args:
        spec: the op.
        settings: the environment.
        tools: the compiler that a probe is linked with.
    """
    from deepspeed_ops.op_builder.libraries import find, io_uring

    compiler, at = tools.host if tools is not None else None, read_distribution(settings.env)
    found = [find(name, compiler, settings, at=at) for name in spec.needs]
    ways = [Way(f.library.name, "load" if f.opens else "absent", f.text, fix=f.fix) for f in found if f is not None]
    return (Way("io_uring", "load", io_uring()), *ways) if "libaio" in spec.needs else tuple(ways)


def op_line(spec: OpSpec, found: list[Resolution], installed: bool) -> OpLine:
    """One op's line of the report.

    Args:
        spec: the op.
        found: the resolution for the host library first, then one for each GPU.
        installed: whether this installation brought the op's host library.

    Returns:
        Compatible, as the op's builder says it: the host library can be had and, for an op with GPU code, the code for
        at least one visible GPU.
    """
    host, gpus = found[0], found[1:]
    ways = [way("host library", host), *(way(resolution.subject, resolution) for resolution in gpus)]
    usable = not spec.device or any(g.action != "fail" for g in gpus)
    note = "runs on a GPU and none is visible" if spec.device and not gpus else ""
    return OpLine(spec.name, installed, host.action != "fail" and usable, tuple(ways), note)


def way(what: str, resolution: Resolution) -> Way:
    """How one half of an op would be loaded, in words."""
    from deepspeed_ops.op_builder.resolve import Accepted

    rejected, others = [], []
    for verdict in resolution.trace:
        if isinstance(verdict, Accepted):
            if verdict is not resolution.choice:
                others.append(f"{verdict.name}: it fits too ({verdict.why}), the one above is better")
        else:
            rejected.append(f"{verdict.name}: {verdict.axis}: {verdict.why}")
    if resolution.choice is None:
        error = resolution.error()
        how = error.what.removeprefix(f"op {resolution.op}: ").replace(f" {resolution.subject}", "")
        return Way(what, "fail", how, tuple(rejected), error.fix)
    choice = resolution.choice
    how = f"load {choice.name} ({choice.why})" if choice.part is not None else choice.name
    return Way(what, resolution.action, how, (*others, *rejected))
