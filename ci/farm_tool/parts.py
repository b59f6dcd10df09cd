"""Building what the farm's store lacks, in parallel, and laying a set out as a folder of its own."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from op_builder.compile import build_part, job_count
from op_builder.errors import StoreError, UsageError
from op_builder.files import FILES
from op_builder.host import HostFacts, detect
from op_builder.plan import PartPlan
from op_builder.settings import Settings
from op_builder.store import Part, Store, store_errors
from op_builder.toolchain import Toolchain, discover_host

from .compilers import fetched, lowest_ffi
from .home import ROOT, Farm
from .sets import Want, device_plans, host_plans, once

Say = Callable[[str], None]
Tick = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Done:
    """One part of a set: what it is, whether the store had it, and what it cost if not."""

    op: str
    variant: str
    compiler: str
    key: str
    sha256: str
    size: int
    hit: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


@dataclass(frozen=True)
class Workplace:
    """What a build works with.

    Attributes:
        farm: where parts are kept.
        settings: environment of the compilers.
        home: holds ``csrc``.
        say: told what happens.
        tick: told (parts done, parts in all, what was done last).
    """

    farm: Farm
    settings: Settings
    home: Path = ROOT
    say: Say = lambda line: None
    tick: Tick = lambda done, total, last: None

    def host_tools(self) -> tuple[Toolchain, HostFacts]:
        """The C++ compiler of this machine, and the machine."""
        host = detect(self.settings.env)
        tools = discover_host(self.settings, host)
        return lowest_ffi(tools, host, self.farm, self.settings, self.say), host


def plans_of(place: Workplace, wants: Sequence[Want], with_host: bool) -> list[PartPlan]:
    """The parts of a set, planned, each once; needs no CUDA compiler."""
    device = device_plans(wants, place.home, {})
    if not with_host:
        return once(device)
    tools, host = place.host_tools()
    return once([*host_plans(place.home, tools, place.settings, host), *device])


def build_set(place: Workplace, wants: Sequence[Want], with_host: bool) -> tuple[list[Part], list[Done]]:
    """Every part of a set, from the store or built into it.

    Returns:
        The parts, and what each took.

    Raises:
        CompilerMissing: a release's compiler cannot be had.
        CompileFailed: a compiler failed; parts that were finished stay in the store.
        StoreError: the disk is full, or the store cannot be written.
    """
    store = place.farm.store
    planned = plans_of(place, wants, with_host)
    here = {p.key: part for p in planned if (part := store.find(p.op, p.variant, p.key)) is not None}
    lacking = [p for p in planned if p.key not in here]
    releases = {p.compiler_release for p in lacking if p.compiler_release is not None}
    compilers = fetched(releases, place.farm, place.settings, place.say)
    real = [w for w in wants if w[1] in compilers]
    by_key = {p.key: p for p in device_plans(real, place.home, compilers)}
    ready = [by_key.get(p.key, p) for p in lacking]
    made = _build(place, store, ready, len(planned)) if ready else {}
    rows, parts = [], []
    for plan in planned:
        part, seconds = made[plan.key] if plan.key in made else (here[plan.key], 0.0)
        m = part.manifest
        parts.append(part)
        rows.append(Done(m.op, m.variant, m.compiler, m.key, m.sha256, m.size, plan.key in here, round(seconds, 3)))
    return parts, rows


def _build(place: Workplace, store: Store, plans: list[PartPlan], total: int) -> dict[str, tuple[Part, float]]:
    ninja = place.host_tools()[0].ninja if any(p.kind == "host" for p in plans) else None
    made: dict[str, tuple[Part, float]] = {}
    done = total - len(plans)
    place.tick(done, total, "from the store")

    def one(plan: PartPlan) -> tuple[str, Part, float]:
        start = time.monotonic()
        part = build_part(plan, store, place.settings, None, ninja)
        return plan.key, part, time.monotonic() - start

    # Host libraries first: they take longest, and ninja runs several compilers for one.
    plans = sorted(plans, key=lambda p: (p.kind != "host", p.compiler_release or (), p.variant, p.op))
    with ThreadPoolExecutor(max_workers=max(1, min(job_count(place.settings), len(plans)))) as pool:
        futures = {pool.submit(one, plan): plan for plan in plans}
        try:
            for future in as_completed(futures):
                key, part, seconds = future.result()
                made[key] = (part, seconds)
                place.tick(done + len(made), total, futures[future].log_line)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return made


def export(parts: Sequence[Part], out: Path) -> None:
    """Make ``out`` a store of exactly these parts, by one rename: readers see the old folder or the new one, whole.

    Raises:
        UsageError: ``out`` holds something else than parts.
        StoreError: it cannot be written.
    """
    out = out.absolute()
    if out.exists() and not _only_parts(out):
        raise UsageError(f"{out} holds more than parts", "it would be replaced as a whole", "--out a folder of its own")
    fresh = out.with_name(f".{out.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with store_errors(out):
            fresh.mkdir(parents=True)
            for part in sorted(parts, key=lambda p: str(p.path)):
                folder = part.path.parent
                shutil.copytree(folder, fresh / folder.parent.name / folder.name)
            if out.exists():
                FILES.remove_tree(out)
            FILES.rename(fresh, out)
    finally:
        FILES.remove_tree(fresh)


def _only_parts(folder: Path) -> bool:
    """Whether everything below is ``<op>/<variant>-<key>/<file>``, and there is nothing that no manifest goes with."""
    if not folder.is_dir():
        return False
    files = [p for p in folder.rglob("*") if not p.is_dir()]
    return all(
        len(p.relative_to(folder).parts) == 3 and (p.suffix == ".json" or p.with_name(f"{p.name}.json").is_file())
        for p in files
    )


def refuse_little_space(folder: Path, needed_gb: float) -> None:
    """Say before the work begins that the disk cannot hold it.

    Raises:
        StoreError: less is free than needed.
    """
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if free < needed_gb:
        what = f"{folder} has {free:.1f} GB free, and this needs about {needed_gb:.1f} GB"
        raise StoreError(what, "a build that runs out of disk is thrown away", "free space, or ci/farm prune")
