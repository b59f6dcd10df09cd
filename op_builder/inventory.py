"""Every part that lies in the stores of this process, and what the resolver says to it. Reads; decides nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CorruptPart, OpsError
from .resolve import Accepted, Rejected
from .spec import OpSpec
from .store import Part, Store, Unreadable, inspect

if TYPE_CHECKING:
    from .gpus import Device
    from .loader import Loader

#: What a part can be, best first. ``stale``: made from other sources than those installed here. ``unfit``: of another
#: platform, C library or ABI, or for a GPU that is not here.
STATES = ("ok", "unfit", "stale", "quarantined", "damaged")
_STATE_OF_AXIS = {"sources": "stale", "quarantined": "quarantined", "corrupt": "damaged"}


@dataclass(frozen=True)
class Entry:
    """One part of a store.

    Attributes:
        op: the op's name.
        variant: ``linux-x86_64``, ``sm90``.
        kind: ``host`` or ``device``.
        origin: which kind of store holds it.
        state: one of :data:`STATES`.
        why: the reason where it is not ``ok``.
        path: its file.
        size: bytes of the file.
        sha256: digest of the file.
        compiler: what made it.
        created_by: version of this project that built it.
    """

    op: str
    variant: str
    kind: str
    origin: str
    state: str
    why: str
    path: str
    size: int
    sha256: str
    compiler: str
    created_by: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


def inventory(loader: Loader, specs: Sequence[OpSpec], devices: Sequence[Device] = ()) -> tuple[Entry, ...]:
    """Every part of the ops in the loader's stores, in the order the stores are searched.

    Args:
        loader: whose stores and host count.
        specs: the ops.
        devices: visible GPUs; without one, GPU parts are judged for a device of their own architecture.
    """
    return tuple(entry for spec in specs for entry in _of_op(loader, spec, devices))


def _of_op(loader: Loader, spec: OpSpec, devices: Sequence[Device]) -> Iterator[Entry]:
    judged = _verdicts(loader, spec, devices)
    for store in loader.stores:
        for part in store.parts(spec.name):
            if isinstance(part, Unreadable):
                name = part.path.parent.name
                yield Entry(spec.name, name, "", part.origin, "damaged", part.why, str(part.path), 0, "", "", "")
                continue
            state, why = _state(part, judged.get(part.path, []))
            found = part.manifest
            facts = (str(part.path), found.size, found.sha256, found.compiler, found.created_by)
            yield Entry(found.op, found.variant, found.kind, part.origin, state, why, *facts)


def _verdicts(loader: Loader, spec: OpSpec, devices: Sequence[Device]) -> dict[Path, list[Accepted | Rejected]]:
    """What the resolver says to each part, by path: once for a host part, once per device for a GPU part."""
    found: dict[Path, list[Accepted | Rejected]] = {}
    asked: list[Device | None] = [None, *(devices or _own_devices(loader, spec))]
    for device in asked if not spec.python_only else ():
        try:
            trace = loader.resolution(spec.name, device, looked=False).trace
        except OpsError as exc:
            trace = ()
            for part in _parts(loader, spec):
                if (part.manifest.kind == "host") is (device is None):
                    found.setdefault(part.path, []).append(Rejected(str(part.path), "abi", f"{exc.what}: {exc.why}"))
        for verdict in trace:
            if verdict.part is not None:
                found.setdefault(verdict.part.path, []).append(verdict)
    return found


def _parts(loader: Loader, spec: OpSpec) -> Iterator[Part]:
    for store in loader.stores:
        yield from (p for p in store.parts(spec.name) if isinstance(p, Part))


def _own_devices(loader: Loader, spec: OpSpec) -> list[Device]:
    """A made-up device per architecture among the op's GPU parts, so that sources and quarantine are judged anyway."""
    from .gpus import Device
    from .targets import Target

    found = set()
    for part in _parts(loader, spec):
        if part.manifest.kind == "device":
            try:
                found.add(Target.from_variant(part.manifest.variant).capability)
            except OpsError:
                continue
    return [Device(-1, "", "", capability, 0) for capability in sorted(found)]


def _state(part: Part, verdicts: Sequence[Accepted | Rejected]) -> tuple[str, str]:
    try:
        inspect(part)
    except CorruptPart as exc:
        return "damaged", exc.why
    if any(isinstance(v, Accepted) for v in verdicts):
        return "ok", ""
    rejected = [v for v in verdicts if isinstance(v, Rejected)]
    if not rejected:
        return "unfit", "nothing here asks for it"
    states = [(_STATE_OF_AXIS.get(v.axis, "unfit"), f"{v.axis}: {v.why}") for v in rejected]
    # Several devices: the verdict nearest to working tells most.
    return min(states, key=lambda s: STATES.index(s[0]))


class _Only(Store):
    """A store of the same place that holds nothing but one part, wherever that lies."""

    def __init__(self, part: Part, root: Path) -> None:
        super().__init__(root)
        self.only = part

    def parts(self, op: str) -> tuple[Part | Unreadable, ...]:
        return (self.only,) if op == self.only.manifest.op else ()


def judge(loader: Loader, part: Part, root: Path) -> Rejected | None:
    """Why a part would never run with what is installed here; None where it would.

    A GPU part is judged for a device of its own architecture: it may be meant for another machine of a shared folder.

    Args:
        loader: whose host and sources count.
        part: it need not lie in a store.
        root: of the JIT store, where this machine's verdicts are kept.
    """
    alone = copy.copy(loader)
    alone.stores = (_Only(part, root),)
    spec = loader.spec_of(part.manifest.op)
    devices: list[Device | None] = [None] if part.manifest.kind == "host" else [*_own_devices(alone, spec)]
    for device in devices:
        for verdict in alone.resolution(spec.name, device, looked=False).trace:
            if isinstance(verdict, Rejected) and verdict.axis != "user-flags":
                return verdict
    return None
