"""Guards against a clean-up that takes what somebody uses, or leaves what nobody can."""

from __future__ import annotations

import os
import time
from pathlib import Path

from op_builder.cleaning import clean, forget
from op_builder.marks import Marks
from op_builder.store import Store
from tests.toys import host_manifest, put


def age(path: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))


def test_what_goes_and_what_stays(tmp_path: Path) -> None:
    """Fault: a young part goes; a damaged one stays; an orphaned build folder fills the disk."""
    store = Store(tmp_path)
    young, old = put(store, host_manifest()), put(store, host_manifest(key="o" * 64))
    broken, bad = put(store, host_manifest(key="b" * 64)), put(store, host_manifest(key="u" * 64))
    age(old.path, 40)
    broken.path.write_bytes(b"cut")
    bad.path.with_name(bad.path.name + ".json").write_text("{", encoding="utf-8")
    for name in (".work/dead", ".work/alive", ".compilers/nvrtc"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"12345")
    for path in (".work/dead", ".compilers/nvrtc"):
        age(tmp_path / path, 40)
    (tmp_path / ".locks").mkdir()
    (tmp_path / ".locks" / "toy.lock").touch()
    age(tmp_path / ".locks" / "toy.lock", 400)
    expected = {
        old.path.parent,
        broken.path.parent,
        bad.path.parent,
        tmp_path / ".work/dead",
        tmp_path / ".compilers/nvrtc",
    }
    planned = clean(store, dry_run=True)
    assert {r.path for r in planned} == expected and not any(r.gone for r in planned)
    assert all(p.exists() for p in expected)
    done = clean(store)
    assert {r.path for r in done} == expected and all(r.gone for r in done)
    assert not any(p.exists() for p in expected) and sum(r.size for r in done) > 10
    assert young.path.exists() and (tmp_path / ".work/alive").exists() and (tmp_path / ".locks/toy.lock").exists()
    assert clean(store) == ()


def test_a_part_that_is_read_is_not_old(tmp_path: Path) -> None:
    """Fault: age by the time of the build takes what is loaded every day."""
    part = put(Store(tmp_path), host_manifest())
    os.utime(part.path, (time.time(), time.time() - 400 * 24 * 3600))
    assert clean(Store(tmp_path)) == ()


def test_everything(tmp_path: Path) -> None:
    """Fault: "--all" leaves a part; or takes the lock that a builder holds."""
    store = Store(tmp_path)
    part = put(store, host_manifest())
    with store.lock("toy"):
        assert [r.path for r in clean(store, everything=True)] == [part.path.parent]
        assert (tmp_path / ".locks" / "toy.lock").exists()
    assert store.parts("toy") == ()


def test_verdicts_are_forgotten_when_asked(tmp_path: Path) -> None:
    """Fault: a quarantine that nobody can lift."""
    Marks(tmp_path).quarantine("abc", "why")
    assert clean(Store(tmp_path)) == () and Marks(tmp_path).quarantined("abc") == "why"
    assert len(forget(Store(tmp_path), dry_run=True)) == 1 and Marks(tmp_path).quarantined("abc") == "why"
    assert [r.gone for r in forget(Store(tmp_path))] == [True]
    assert Marks(tmp_path).quarantined("abc") is None


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    """Fault: an error for a machine that never built anything."""
    assert clean(Store(tmp_path / "no")) == () and forget(Store(tmp_path / "no")) == ()
    assert not (tmp_path / "no").exists()
