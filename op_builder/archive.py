"""Parts as one file: what was built on one machine is taken over by another, digest for digest, without a compiler.

The file is a zip of stored (not compressed) members with fixed times, so that equal parts give equal archives::

    index.json                        format, version, and name, size and sha256 of every other member
    <op>/<variant>/<filename>         a part
    <op>/<variant>/<filename>.json    its manifest

Nothing in it is trusted: members are read one by one by the names of the index, compared with index and manifest, and
what the manifest claims is read back from the part itself. An archive is not signed: import what you would install.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CorruptPart, NoMatchingPart, OpsError, StoreError, UsageError
from .files import FILES
from .manifest import Manifest, facts_as_fields, read_elf, read_gpu, read_macho, read_pe
from .store import Part, Store, Workshop, store_errors, verify

FORMAT = 1
INDEX = "index.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_KEY = re.compile(r"[0-9A-Za-z(), .+_-]{1,128}")
_LARGEST = 1 << 30  # bytes of a member: a part is some 100 KB


@dataclass(frozen=True)
class Packed:
    """One part of an archive, as checked: its manifest and its bytes."""

    manifest: Manifest
    content: bytes


@dataclass(frozen=True)
class Imported:
    """What became of one part of an archive: ``imported``, or ``already there``."""

    part: Part
    outcome: str


def export_parts(parts: Sequence[Part], out: Path, made_by: str) -> None:
    """Write an archive, whole or not at all.

    Args:
        parts: verified before they are taken.
        out: replaced if it exists.
        made_by: version of this project.

    Raises:
        UsageError: no part, or two of one name.
        CorruptPart: a part is damaged.
        StoreError: ``out`` cannot be written.
    """
    if not parts:
        raise UsageError("there is no part to export", "nothing that was asked for lies ready here", "ds_ops build")
    members: dict[str, bytes] = {}
    for part in parts:
        verify(part)
        name = f"{part.manifest.op}/{part.manifest.variant}/{part.manifest.filename}"
        if name in members:
            raise UsageError(f"two parts are called {name}", "an archive holds one part per op and variant", "")
        members[name] = part.path.read_bytes()
        members[f"{name}.json"] = part.manifest.to_json().encode("ascii")
    listed = [{"name": n, "size": len(data), "sha256": _sha256(data)} for n, data in sorted(members.items())]
    index = {"format": FORMAT, "made_by": made_by, "members": listed}
    with store_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
        try:
            with zipfile.ZipFile(fresh, "w", zipfile.ZIP_STORED) as archive:
                head = (json.dumps(index, indent=1, sort_keys=True) + "\n").encode("ascii")
                for name, data in [(INDEX, head), *sorted(members.items())]:
                    info = zipfile.ZipInfo(name, _EPOCH)
                    info.create_system, info.external_attr = 3, 0o644 << 16
                    archive.writestr(info, data)
            FILES.replace(fresh, out)
        finally:
            FILES.remove(fresh)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- reading ------------------------------------------------------------------------------------------------------


def read_archive(path: Path, known: Callable[[str], object] = lambda op: None) -> tuple[Packed, ...]:
    """Everything in an archive, checked against its index, its manifests and the parts themselves.

    Args:
        path: the file.
        known: called with each op's name; raises :class:`UsageError` for one that is not ours.

    Raises:
        CorruptPart: truncated, altered, or not an archive of ours.
        UsageError: it cannot be opened, or holds a part of an op that is not here.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(_packed(archive, str(path), known))
    except FileNotFoundError as exc:
        raise UsageError(f"cannot open {path}", str(exc), "ds_ops export OP -o FILE writes one") from exc
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, KeyError) as exc:
        if isinstance(exc, OpsError):
            raise
        raise _corrupt(path, f"{type(exc).__name__}: {exc}") from exc


def _corrupt(path: Path | str, why: str) -> CorruptPart:
    return CorruptPart(
        f"{path} is truncated, altered, or no archive of parts", why, "copy it again from where it was made"
    )


def _packed(archive: zipfile.ZipFile, where: str, known: Callable[[str], object]) -> Iterable[Packed]:
    index = json.loads(_member(archive, INDEX, where))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _corrupt(where, f"expected an index of format {FORMAT}, found {str(index)[:80]!r}")
    listed: dict[str, Any] = {m["name"]: m for m in index["members"]}
    names = sorted(archive.namelist())
    if names != sorted([INDEX, *listed]):
        raise _corrupt(where, f"members {names} are not those of the index {sorted(listed)}")
    data = {}
    for name, facts in listed.items():
        data[name] = _member(archive, name, where)
        if len(data[name]) != facts["size"] or _sha256(data[name]) != facts["sha256"]:
            raise _corrupt(where, f"{name}: expected sha256 {facts['sha256']}, found {_sha256(data[name])}")
    for name in sorted(data):
        if name.endswith(".json"):
            yield _checked(name, data, where, known)
        elif f"{name}.json" not in data:
            raise _corrupt(where, f"{name} has no manifest")


def _member(archive: zipfile.ZipFile, name: str, where: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST:
        raise _corrupt(where, f"{name} claims {archive.getinfo(name).file_size} bytes")
    return archive.read(name)


def _checked(name: str, data: dict[str, bytes], where: str, known: Callable[[str], object]) -> Packed:
    manifest = Manifest.from_json(data[name], f"{where}: {name}")
    known(manifest.op)
    # These become folder names.
    for text, pattern in ((manifest.op, _NAME), (manifest.variant, _NAME), (manifest.key, _KEY)):
        if not pattern.fullmatch(text) or ".." in text:
            raise _corrupt(where, f"{text!r} cannot name a part")
    content = data.get(name.removesuffix(".json"))
    if content is None or name != f"{manifest.op}/{manifest.variant}/{manifest.filename}.json":
        raise _corrupt(where, f"the manifest {name} belongs to no part")
    if len(content) != manifest.size or _sha256(content) != manifest.sha256:
        raise _corrupt(where, f"{manifest.filename}: expected sha256 {manifest.sha256}, found {_sha256(content)}")
    return Packed(manifest, content)


def read_back(file: Path, manifest: Manifest) -> None:
    """Compare what a manifest claims with what the finished file says.

    Raises:
        CorruptPart: they differ.
    """
    try:
        if manifest.kind == "device":
            facts = facts_as_fields(read_gpu(file.read_bytes(), str(file)))
        else:
            reader = {".dll": read_pe, ".dylib": read_macho}.get(file.suffix, read_elf)
            library = reader(file)
            facts = {**facts_as_fields(library), "platform": f"{manifest.platform.partition('-')[0]}-{library.machine}"}
    except OpsError as exc:
        raise CorruptPart(f"{manifest.filename} cannot be read", f"{exc.what}: {exc.why}", "export it again") from exc
    wrong = {k: (getattr(manifest, k), v) for k, v in facts.items() if getattr(manifest, k) != v}
    if wrong:
        told = "; ".join(f"{k} {claimed!r}, the file has {found!r}" for k, (claimed, found) in wrong.items())
        raise CorruptPart(
            f"the manifest of {manifest.filename} does not describe it", f"it claims {told}", "export it again"
        )


# --- taking over --------------------------------------------------------------------------------------------------


def import_parts(
    packed: Sequence[Packed], store: Store, refuse: Callable[[Part], OpsError | None]
) -> tuple[Imported, ...]:
    """Publish every part of an archive into a store, or none of them.

    Args:
        packed: what :func:`read_archive` gave.
        store: where they go.
        refuse: says why a part would not run here; None for one that does.

    Raises:
        CorruptPart: a manifest does not describe its part.
        NoMatchingPart: as ``refuse`` says.
        StoreError: the store cannot be written, or is full; nothing is left of the import then.
    """
    new: list[Part] = []
    out: list[Imported] = []
    with contextlib.ExitStack() as shops:
        staged = [(item, shops.enter_context(store.workshop())) for item in packed]
        for item, shop in staged:
            _stage(item, shop, store, refuse)
        try:
            for item, shop in staged:
                found = item.manifest
                there = store.find(found.op, found.variant, found.key)
                part = there or store.publish(shop, found.filename, found)
                if there is None:
                    new.append(part)
                    if part.path.parent != store.final_folder(found.op, found.variant, found.key):
                        why = "another folder has its name and cannot be replaced"
                        raise StoreError(
                            f"{found.op} {found.variant} cannot be published in {store.root}", why, "ds_ops gc"
                        )
                out.append(Imported(part, "already there" if there is not None else "imported"))
        except BaseException:
            for part in new:
                FILES.remove_tree(part.path.parent)
            raise
        finally:
            for _, shop in staged:
                FILES.remove_tree(shop.part)
    return tuple(out)


def _stage(item: Packed, shop: Workshop, store: Store, refuse: Callable[[Part], OpsError | None]) -> None:
    file = shop.part / item.manifest.filename
    with store_errors(store.root):
        file.write_bytes(item.content)
        if os.name == "posix":
            file.chmod(0o755 if item.manifest.kind == "host" else 0o644)
    read_back(file, item.manifest)
    problem = refuse(Part(file, item.manifest, store.origin))
    if problem is not None:
        raise problem


def refusal(rejected: Any) -> NoMatchingPart:
    """A resolver's verdict against a part, as the error of an import."""
    fix = rejected.fix or "ds_ops build"
    return NoMatchingPart(
        f"{rejected.part.manifest.op} {rejected.part.manifest.variant} is refused",
        f"{rejected.axis}: {rejected.why}",
        fix,
    )
