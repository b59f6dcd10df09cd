"""Store, marks and locks on a disk with Windows' rules: a scanner holds a new file, a process holds a library, a name
is taken, a deleted file is still going."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from op_builder import files, marks
from op_builder.files import Files, held
from op_builder.locks import hold
from op_builder.marks import DIED, FRESH, KNOWN, Marks
from op_builder.store import Part, Store
from tests.toys import host_manifest
from tests.unit.windows.recorded import ACCESS_DENIED, ALREADY_EXISTS, DIR_NOT_EMPTY, WindowsDisk, refusal

MANIFEST = host_manifest(variant="windows-x86_64", platform="windows-x86_64", filename="toy.windows-x86_64.dll")
FINAL = Path("toy", f"windows-x86_64-{'k' * 20}")


def publish(store: Store, disk: WindowsDisk, scanned: int | None = None, content: bytes = b"a library") -> Part:
    """Build and publish the part; a scanner opens the new file for so many pauses."""
    with store.workshop() as shop:
        file = shop.part / MANIFEST.filename
        file.write_bytes(content)
        if scanned:
            disk.hold(file, scanned)
        return store.publish(shop, MANIFEST.filename, MANIFEST)


def test_a_scanner_that_holds_a_new_library_delays_its_publication(tmp_path: Path) -> None:
    """Fault: [WinError 5] from the rename of a finished build, because a virus scanner looks at the new DLL."""
    disk = WindowsDisk()
    part = publish(Store(tmp_path, files=disk.files()), disk, scanned=3)
    assert part.path == tmp_path / FINAL / MANIFEST.filename and part.path.read_bytes() == b"a library"
    assert len(disk.pauses) == 3 and sum(disk.pauses) < 0.1


def test_without_a_scanner_nothing_waits(tmp_path: Path) -> None:
    """Fault: every publication pays for the worst case."""
    disk = WindowsDisk()
    assert publish(Store(tmp_path, files=disk.files()), disk).path.is_file() and not disk.pauses


def test_a_name_that_is_taken_is_an_answer_and_not_a_moment(tmp_path: Path) -> None:
    """Fault: the loser of a race waits for the winner's folder to go away, or replaces what the winner has loaded."""
    disk = WindowsDisk()
    store = Store(tmp_path, files=disk.files())
    first = publish(store, disk)
    disk.hold(first.path)  # the winner has loaded it
    second = publish(store, disk)
    assert second.path == first.path and not disk.pauses
    assert not list((tmp_path / ".work").glob("*/part"))


@pytest.mark.parametrize("loaded", [False, True], ids=["free", "loaded by a process"])
def test_a_damaged_part_makes_way_or_is_left_where_it_is(tmp_path: Path, loaded: bool) -> None:
    """Fault: a broken part that a process has open makes every later build fail; waiting for it has no end."""
    disk = WindowsDisk()
    (tmp_path / FINAL).mkdir(parents=True)
    damaged = tmp_path / FINAL / MANIFEST.filename
    damaged.write_bytes(b"half")
    if loaded:
        disk.hold(damaged)
    part = publish(Store(tmp_path, files=disk.files()), disk)
    assert part.path.read_bytes() == b"a library"
    assert (part.path.parent == tmp_path / FINAL) is not loaded, "held: the private copy is the part"
    assert sum(disk.pauses) <= 3 * sum(files._PAUSES_S)


def test_renaming_over_an_open_file(tmp_path: Path) -> None:
    """Fault: the rename is given up at once, or tried for ever."""
    new, old = tmp_path / "new", tmp_path / "old"
    for pauses, works in ((2, True), (None, False)):
        new.write_text("new", encoding="utf-8")
        old.write_text("old", encoding="utf-8")
        disk = WindowsDisk({old: pauses})
        if works:
            disk.files().replace(new, old)
        else:
            with pytest.raises(PermissionError):
                disk.files().replace(new, old)
        assert old.read_text(encoding="utf-8") == ("new" if works else "old")
        assert len(disk.pauses) == (2 if works else len(files._PAUSES_S))


def test_deleting_present_absent_and_held(tmp_path: Path) -> None:
    """Fault: tidying up raises, or claims that a file is gone which is not."""
    path = tmp_path / "x"
    disk = WindowsDisk()
    assert disk.files().remove(path) and not disk.pauses  # absent
    path.touch()
    assert disk.files().remove(path) and not path.exists()
    path.touch()
    disk.hold(path)
    assert not disk.files().remove(path) and path.exists()


def test_a_folder_whose_last_file_is_still_going(tmp_path: Path) -> None:
    """Fault: delete-pending: the folder is "not empty" although everything in it was deleted."""
    folder = tmp_path / "f"
    folder.mkdir()
    refusals = [refusal(DIR_NOT_EMPTY, folder), refusal(ACCESS_DENIED, folder)]

    def rmtree(path: Path) -> None:
        if refusals:
            raise refusals.pop()
        path.rmdir()

    pauses: list[float] = []
    assert Files(True, pauses.append, rmtree_once=rmtree).remove_tree(folder) and len(pauses) == 2


def test_a_folder_of_which_one_file_is_loaded(tmp_path: Path) -> None:
    """Fault: nothing is removed because one file cannot be; or the caller is told that all went."""
    (tmp_path / "f").mkdir()
    for name in ("loaded.dll", "other.dll"):
        (tmp_path / "f" / name).touch()
    disk = WindowsDisk({tmp_path / "f" / "loaded.dll": None})
    assert not disk.files().remove_tree(tmp_path / "f")
    assert [p.name for p in (tmp_path / "f").iterdir()] == ["loaded.dll"]
    assert disk.files().remove_tree(tmp_path / "absent")


def test_deleting_goes_on_past_the_first_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one held file keeps all files after it in the folder."""
    for name in ("a", "b", "c"):
        (tmp_path / "f" / name).mkdir(parents=True)
        (tmp_path / "f" / name / "x").touch()
    real = os.unlink

    def unlink(path: str, **kwargs: int) -> None:
        if Path(path).name == "x" and not refused:
            refused.append(path)
            raise refusal(32, Path(path))
        real(path, **kwargs)

    refused: list[str] = []
    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(PermissionError):
        files.delete_all(tmp_path / "f")
    assert len(list((tmp_path / "f").rglob("x"))) == 1


def test_posix_never_waits(tmp_path: Path) -> None:
    """Fault: on Linux a real refusal takes a second longer to be told."""

    def refuse(*_: Path) -> None:
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError):
        Files(False, lambda s: pytest.fail("slept"), rename_once=refuse).rename(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("code", "waits"), [(5, True), (32, True), (33, True), (145, True), (2, False), (112, False)])
def test_which_refusals_are_a_matter_of_a_moment(code: int, waits: bool) -> None:
    """Fault: a full disk (112) or a missing file (2) is waited for."""
    assert held(refusal(code, Path("x"))) is waits
    assert not held(refusal(ALREADY_EXISTS, Path("x")))


def test_writing_small_files_whole(tmp_path: Path) -> None:
    """Fault: a reader sees half a file; a file that cannot be replaced leaves its successor lying about."""
    path = tmp_path / "a.json"
    disk = WindowsDisk()
    disk.files().write_text(path, "eins äöü 中")
    assert path.read_text(encoding="utf-8") == "eins äöü 中"
    disk.hold(path)
    with pytest.raises(PermissionError):
        disk.files().write_text(path, "zwei")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and path.read_text(encoding="utf-8") == "eins äöü 中"


@pytest.mark.parametrize(("pauses", "next_verdict"), [(3, KNOWN), (None, DIED)], ids=["a scanner", "for ever"])
def test_a_mark_that_somebody_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: int | None, next_verdict: str
) -> None:
    """Fault: a scanner that reads the mark "being loaded" makes the next process believe that this one died."""
    disk = WindowsDisk()
    monkeypatch.setattr(marks, "FILES", disk.files())
    seen = Marks(tmp_path, "ffi")
    with seen.first_use("a" * 64) as verdict:
        assert verdict == FRESH
        (trying,) = (tmp_path / ".marks").glob("*.trying.json")
        disk.hold(trying, pauses)
    if next_verdict == KNOWN:
        assert not trying.exists()
    else:  # the mark stays, and still counts for nothing: the part is known to load
        assert trying.exists()
    with seen.first_use("a" * 64) as verdict:
        assert verdict == KNOWN


def test_a_lock_whose_holder_note_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a waiter that reads who holds the lock keeps its holder from releasing it."""
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".holder":
            raise refusal(32, path)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with hold(tmp_path, "toy") as locked:
        assert locked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hold(tmp_path, "toy", patience_s=0.2, limit_s=0.2) as locked:
            assert locked, "the first holder let go"
