"""Guards against archives that are half taken over, lied to about their content, or unequal for equal parts."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from op_builder import archive as room
from op_builder.archive import export_parts, import_parts, read_archive
from op_builder.errors import CorruptPart, NoMatchingPart, OpsError, StoreError, UsageError
from op_builder.manifest import Manifest, facts_as_fields, read_elf
from op_builder.process import platform_facts
from op_builder.store import Part, Store
from tests.toys import host_manifest, put

ROOT = Path(__file__).resolve().parents[3]


def a_library() -> Path:
    """Some ELF file of this machine; ninja and Python's own modules are everywhere the tests run."""
    import _ctypes

    return Path(_ctypes.__file__)


def real_manifest(**changes: Any) -> Manifest:
    """A manifest that tells the truth about :func:`a_library`."""
    if platform_facts().system != "linux":
        pytest.skip("Linux only: the part of this test is an ELF file")
    facts = facts_as_fields(read_elf(a_library()))
    made = host_manifest(platform=platform_facts().platform, variant=platform_facts().platform, **facts)
    return dataclasses.replace(made, **changes)


def exported(tmp_path: Path, *manifests: Manifest) -> tuple[Path, list[Part]]:
    store = Store(tmp_path / "made")
    parts = [put(store, m, a_library().read_bytes()) for m in manifests or [real_manifest()]]
    export_parts(parts, tmp_path / "a b" / "parts.dsops", "1.2.3")
    return tmp_path / "a b" / "parts.dsops", parts


def accept(part: Part) -> None:
    return None


def published(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) if root.exists() else []


def test_what_was_exported_arrives_digest_for_digest(tmp_path: Path) -> None:
    """Fault: a part or manifest that differs by a byte after the journey; a second import that does it again."""
    file, (part,) = exported(tmp_path)
    store = Store(tmp_path / "there")
    (done,) = import_parts(read_archive(file), store, accept)
    assert done.outcome == "imported" and done.part.path.read_bytes() == part.path.read_bytes()
    name = f"{part.path.name}.json"
    assert done.part.path.with_name(name).read_bytes() == part.path.with_name(name).read_bytes()
    assert store.find("toy", part.manifest.variant, part.manifest.key) == done.part
    (again,) = import_parts(read_archive(file), store, accept)
    assert again.outcome == "already there" and again.part == done.part
    assert len(published(store.root)) == 2


def test_equal_parts_give_equal_archives(tmp_path: Path) -> None:
    """Fault: the time of day in the archive; nobody can compare two of them."""
    one, _ = exported(tmp_path / "one")
    two, _ = exported(tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99, -1])
def test_a_truncated_archive_is_refused(tmp_path: Path, keep: float) -> None:
    """Fault: a download that broke off installs what arrived of it."""
    file, _ = exported(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CorruptPart, match="truncated"):
        read_archive(file)


def rewritten(file: Path, change: dict[str, Any]) -> None:
    """The archive again, with members replaced (None: left out), and the index as it was unless it is replaced too."""
    with zipfile.ZipFile(file) as old:
        members = {n: old.read(n) for n in old.namelist()}
    members.update(change)
    with zipfile.ZipFile(file, "w") as new:
        for name, data in members.items():
            if data is not None:
                new.writestr(name, data)


def with_index(file: Path, change: dict[str, bytes]) -> dict[str, Any]:
    """The change, and an index that agrees with it: what somebody does who alters a part knowingly."""
    import hashlib

    with zipfile.ZipFile(file) as old:
        members = {n: old.read(n) for n in old.namelist() if n != room.INDEX} | change
    listed = [{"name": n, "size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in members.items()]
    return {**members, room.INDEX: json.dumps({"format": room.FORMAT, "made_by": "x", "members": listed}).encode()}


def test_an_altered_part_is_refused(tmp_path: Path) -> None:
    """Fault: one flipped bit in the library, and a process dies in it."""
    file, (part,) = exported(tmp_path)
    name = f"toy/{part.manifest.variant}/{part.path.name}"
    other = bytearray(part.path.read_bytes())
    other[len(other) // 2] ^= 1
    rewritten(file, {name: bytes(other)})
    with pytest.raises(CorruptPart, match="sha256"):
        read_archive(file)
    rewritten(file, with_index(file, {name: bytes(other)}))  # the index agrees, the manifest does not
    with pytest.raises(CorruptPart, match="sha256"):
        read_archive(file)


@pytest.mark.parametrize(
    "change", [{"platform": "linux-aarch64"}, {"needed": ()}, {"glibc": (2, 2)}], ids=lambda c: str(next(iter(c)))
)
def test_a_manifest_that_lies_about_its_part_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Fault: "made for this platform", says the JSON, and the ELF is for another one."""
    file, _ = exported(tmp_path, real_manifest(**change))
    store = Store(tmp_path / "there")
    with pytest.raises(CorruptPart, match="does not describe"):
        import_parts(read_archive(file), store, accept)
    assert published(store.root) == []


@pytest.mark.parametrize(
    "change",
    [
        {room.INDEX: b"{"},
        {room.INDEX: b"[]"},
        {room.INDEX: b'{"format": 2, "members": []}'},
        {room.INDEX: b'{"format": 1}'},
        {room.INDEX: None},
        {"../../evil": b"x"},
        {"toy/extra": b"x"},
    ],
    ids=str,
)
def test_a_strange_archive_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Fault: a traceback of the zip or JSON reader; a member that nobody listed is unpacked."""
    file, _ = exported(tmp_path)
    rewritten(file, change)
    with pytest.raises(CorruptPart):
        read_archive(file)


@pytest.mark.parametrize(("field", "value"), [("op", "../toy"), ("variant", "a/b"), ("variant", ".."), ("key", "../x")])
def test_names_that_leave_the_store_are_refused(tmp_path: Path, field: str, value: str) -> None:
    """Fault: a manifest that names a folder outside the store."""
    file, (part,) = exported(tmp_path)
    manifest = dataclasses.replace(part.manifest, **{field: value})
    old = f"toy/{part.manifest.variant}/{part.path.name}"
    new = f"{manifest.op}/{manifest.variant}/{part.path.name}"
    change = with_index(file, {new: part.path.read_bytes(), f"{new}.json": manifest.to_json().encode()})
    if new != old:
        change = {k: v for k, v in change.items() if k not in (old, f"{old}.json")}
        index = json.loads(change[room.INDEX])
        index["members"] = [m for m in index["members"] if m["name"] not in (old, f"{old}.json")]
        change |= {room.INDEX: json.dumps(index).encode(), old: None, f"{old}.json": None}
    rewritten(file, change)
    with pytest.raises(CorruptPart, match="cannot name a part"):
        read_archive(file)


def test_an_op_that_is_not_here_is_refused(tmp_path: Path) -> None:
    """Fault: parts of a newer release fill the store under a name nobody will ever ask for."""
    from op_builder.spec import get_spec

    file, _ = exported(tmp_path)
    with pytest.raises(UsageError, match="'toy'"):
        read_archive(file, get_spec)


def test_one_refused_part_leaves_nothing(tmp_path: Path) -> None:
    """Fault: half of an archive is installed and the exit code is an error."""
    other = real_manifest(key="q" * 64, variant="linux-other")
    file, _ = exported(tmp_path, real_manifest(), other)
    store = Store(tmp_path / "there")

    def refuse(part: Part) -> OpsError | None:
        return NoMatchingPart("refused", "platform: x", "y") if part.manifest.variant == "linux-other" else None

    with pytest.raises(NoMatchingPart):
        import_parts(read_archive(file), store, refuse)
    assert published(store.root) == []


def test_a_disk_that_fills_up_between_two_parts_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the first part of an import stays although the second one found no space."""
    file, _ = exported(tmp_path, real_manifest(), real_manifest(key="q" * 64, variant="linux-other"))
    store, calls = Store(tmp_path / "there"), []
    publish = Store.publish

    def full(self: Store, *args: Any) -> Part:
        calls.append(args)
        if len(calls) == 2:
            raise StoreError("full", "ENOSPC", "")
        return publish(self, *args)

    monkeypatch.setattr(Store, "publish", full)
    with pytest.raises(StoreError):
        import_parts(read_archive(file), store, accept)
    assert len(calls) == 2 and published(store.root) == []


def test_a_damaged_part_is_not_exported(tmp_path: Path) -> None:
    """Fault: damage travels."""
    _, (part,) = exported(tmp_path)
    part.path.write_bytes(b"cut")
    with pytest.raises(CorruptPart):
        export_parts([part], tmp_path / "again", "1")
    assert not (tmp_path / "again").exists()
    with pytest.raises(UsageError, match="no part to export"):
        export_parts([], tmp_path / "again", "1")
