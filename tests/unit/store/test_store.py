"""Guards against parts that are half written, foreign, lost, or put where they do not belong."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
import warnings
from pathlib import Path

import pytest

from op_builder import store as store_module
from op_builder.errors import CorruptPart, StoreError
from op_builder.locks import hold, try_now
from op_builder.marks import BUSY, DIED, FRESH, KNOWN, Marks
from op_builder.settings import Settings
from op_builder.store import Part, Store, Unreadable, default_extensions_dir, jit_store, search, verify
from tests.toys import host_manifest, put


def files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def test_a_published_part_is_found_again_and_verifies(tmp_path: Path) -> None:
    """Fault: a part that was built and cannot be found by its key, or leaves scratch files behind."""
    store = Store(tmp_path)
    part = put(store, host_manifest())
    assert store.find("toy", "linux-x86_64", "k" * 64) == part
    assert store.parts("toy") == (part,)
    verify(part)
    folder = "toy/linux-x86_64-" + "k" * 20
    assert files(tmp_path) == [f"{folder}/toy.linux-x86_64.so", f"{folder}/toy.linux-x86_64.so.json"]
    assert part.manifest.size == 17 and part.manifest.created_by == "1.2.3"


@pytest.mark.parametrize("damage", [b"content of", b"content of a PART", b""])
def test_a_damaged_part_is_not_found_and_gets_replaced(tmp_path: Path, damage: bytes) -> None:
    """Fault (half-written library): a cut or altered file at its final path is mapped, which is SIGBUS."""
    store = Store(tmp_path)
    part = put(store, host_manifest())
    part.path.write_bytes(damage)
    with pytest.raises(CorruptPart):
        verify(part)
    assert store.find("toy", "linux-x86_64", "k" * 64) is None
    again = put(store, host_manifest())
    assert again.path == part.path
    verify(again)


def test_a_part_without_its_file_is_corrupt(tmp_path: Path) -> None:
    """Fault: an OSError instead of the error that lets the chain go on."""
    part = put(Store(tmp_path), host_manifest())
    part.path.unlink()
    with pytest.raises(CorruptPart):
        verify(part)


def test_an_unreadable_manifest_is_reported_not_raised(tmp_path: Path) -> None:
    """Fault: one bad JSON file hides every other part of the op."""
    store = Store(tmp_path, "package")
    part = put(store, host_manifest())
    other = put(store, host_manifest(key="q" * 64))
    other.path.with_name(other.path.name + ".json").write_text("{", encoding="utf-8")
    found = store.parts("toy")
    assert part in found
    assert [type(p) for p in found if p != part] == [Unreadable]


def test_the_loser_of_a_race_takes_the_winners_part(tmp_path: Path) -> None:
    """Fault (racing builders): the second rename fails and the second builder with it."""
    store, other = Store(tmp_path), Store(tmp_path)
    with store.workshop() as one, other.workshop() as two:
        for shop in (one, two):
            (shop.part / "toy.so").write_bytes(b"same")
        first = store.publish(one, "toy.so", host_manifest())
        second = other.publish(two, "toy.so", host_manifest())
    assert first == second
    assert len(files(tmp_path)) == 2


def test_a_loser_who_cannot_see_the_winner_uses_its_private_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault (NFS): the winner's folder is not visible yet, and the loser raises or waits for ever."""
    store = Store(tmp_path)
    put(store, host_manifest())
    monkeypatch.setattr(Store, "find", lambda *args: None)
    monkeypatch.setattr(Store, "discard", lambda *args: None)
    part = put(store, host_manifest(), b"mine")
    assert ".work" in part.path.parts
    assert part.path.read_bytes() == b"mine"
    verify(part)


def test_nothing_appears_at_the_final_path_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (half-written library): a reader sees a part that is being written."""
    store, seen = Store(tmp_path), []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: (seen.append(store.parts("toy")), rename(a, b))[1])
    put(store, host_manifest())
    assert seen == [()]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """Fault: a failed build is remembered as done, or fills the disk."""
    store = Store(tmp_path)
    with pytest.raises(ZeroDivisionError), store.workshop() as shop:
        (shop.scratch / "x.o").write_bytes(b"x")
        (shop.part / "toy.so").write_bytes(b"half")
        _ = 1 / 0
    assert files(tmp_path) == []
    assert store.parts("toy") == ()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)])
def test_a_full_or_read_only_disk_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Fault: a bare OSError that does not name the store, nor the variable that moves it."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StoreError) as err:
        put(Store(tmp_path), host_manifest())
    assert str(tmp_path) in err.value.what and "TORCH_EXTENSIONS_DIR" in err.value.fix


def test_old_private_folders_are_swept_and_young_ones_kept(tmp_path: Path) -> None:
    """Fault: killed builders fill the disk; or a sweep takes the folder of a builder that still runs."""
    work = tmp_path / ".work"
    (work / "old").mkdir(parents=True)
    (work / "young").mkdir()
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(work / "old", (long_ago, long_ago))
    put(Store(tmp_path), host_manifest())
    assert sorted(p.name for p in work.iterdir()) == ["young"]


def test_a_stale_lock_file_is_harmless(tmp_path: Path) -> None:
    """Fault (stale lock): an empty file named ``lock``, or our own lock file of a dead holder, blocks for ever."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "lock").touch()
    (tmp_path / ".locks").mkdir()
    (tmp_path / ".locks" / "toy.lock").touch()
    started = time.monotonic()
    with Store(tmp_path).lock("toy") as held:
        assert held
        put(Store(tmp_path), host_manifest())
    assert time.monotonic() - started < 2
    assert len(Store(tmp_path).parts("toy")) == 1


def test_a_waiter_says_once_whom_it_waits_for(tmp_path: Path) -> None:
    """Fault (stale lock): a silent wait; or the same line again and again."""
    said: list[str] = []
    release = threading.Event()

    def holder() -> None:
        with hold(tmp_path, "toy"):
            release.wait(10)

    thread = threading.Thread(target=holder)
    thread.start()
    while not (tmp_path / "toy.holder").exists():
        time.sleep(0.01)
    threading.Timer(0.8, release.set).start()
    with hold(tmp_path, "toy", said.append, patience_s=0.1) as held:
        assert held
    thread.join()
    assert len(said) == 1
    assert str(tmp_path / "toy.lock") in said[0] and f"process {os.getpid()} on " in said[0]


def test_a_waiter_gives_up_on_a_holder_that_never_ends(tmp_path: Path) -> None:
    """Fault: a hung builder stops every other process for ever."""
    with hold(tmp_path, "toy"):
        got: list[bool] = []

        def wait() -> None:
            with hold(tmp_path, "toy", patience_s=0.1, limit_s=0.1) as held:
                got.append(held)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(10)
    assert got == [False]


def test_a_file_system_without_locks_builds_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (NFS): "No locks available" ends the build."""
    import filelock

    def no_locks(self: object, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    with hold(tmp_path, "toy") as held:
        assert not held
    assert try_now(tmp_path / "x.lock") is None


def home_env(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "TMPDIR": str(home / "tmp")}


def test_the_jit_store_lies_below_torchs_folder(tmp_path: Path) -> None:
    """Fault: parts of ours mixed with torch's own, or in a place that ``TORCH_EXTENSIONS_DIR`` does not move."""
    env = home_env(tmp_path)
    assert jit_store(Settings.read(env)).root == tmp_path / ".cache" / "torch_extensions" / "deepspeed_ops"
    moved = Settings.read({**env, "TORCH_EXTENSIONS_DIR": str(tmp_path / "a b")})
    assert jit_store(moved).root == tmp_path / "a b" / "deepspeed_ops"
    cache = Settings.read({**env, "XDG_CACHE_HOME": str(tmp_path / "xdg")})
    assert jit_store(cache).root == tmp_path / "xdg" / "torch_extensions" / "deepspeed_ops"


@pytest.mark.parametrize(
    ("system", "env", "expected"),
    [
        ("win32", {"LOCALAPPDATA": "/la"}, "/la/torch_extensions/torch_extensions/Cache"),
        ("win32", {"USERPROFILE": "/u"}, "/u/AppData/Local/torch_extensions/torch_extensions/Cache"),
        ("darwin", {"HOME": "/u"}, "/u/Library/Caches/torch_extensions"),
        ("linux", {"HOME": "/u"}, "/u/.cache/torch_extensions"),
        ("linux", {"HOME": "/"}, None),
    ],
)
def test_torchs_default_folder_per_system(system: str, env: dict[str, str], expected: str | None) -> None:
    """Fault: a second cache folder beside torch's; ``/.cache`` for a container's user."""
    assert default_extensions_dir(env, system) == (Path(expected) if expected else None)


@pytest.mark.parametrize("home", ["", "/", "unwritable"])
def test_without_a_home_parts_go_to_a_private_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """Fault (non-root container): an error, the current folder, ``/``, or a folder that others can write."""
    monkeypatch.setattr(store_module, "_warned", set())
    monkeypatch.setattr(Path, "expanduser", lambda self: self)  # a uid without a passwd entry
    (tmp_path / "tmp").mkdir()
    blocker = tmp_path / "unwritable"
    blocker.write_text("a file, so that nothing can be made below it", encoding="utf-8")
    env = {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(blocker) if home == "unwritable" else home}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = jit_store(Settings.read(env)), jit_store(Settings.read(env))
    assert first.root == second.root and first.root.parent == tmp_path / "tmp"
    assert first.root.stat().st_mode & 0o077 == 0
    assert len(caught) == 1 and "TORCH_EXTENSIONS_DIR" in str(caught[0].message)
    assert first.root in [s.root for s in search(Settings.read(env), tmp_path)]


def test_a_temporary_folder_that_someone_else_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a library that another user put under a known name in /tmp runs as us."""
    monkeypatch.setattr(Path, "expanduser", lambda self: self)
    planted = tmp_path / f"deepspeed_ops-{os.getuid()}"
    planted.mkdir(mode=0o777)
    planted.chmod(0o777)
    env = {"TMPDIR": str(tmp_path), "HOME": ""}
    with pytest.warns(RuntimeWarning):
        root = jit_store(Settings.read(env)).root
    assert root != planted and root.parent == tmp_path and root.stat().st_mode & 0o077 == 0
    assert planted not in [s.root for s in search(Settings.read(env), tmp_path)]


def test_an_unwritable_extensions_dir_is_an_error(tmp_path: Path) -> None:
    """Fault: the user names a folder and something else is used without a word."""
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(StoreError, match="TORCH_EXTENSIONS_DIR"):
        jit_store(Settings.read({"TORCH_EXTENSIONS_DIR": str(blocker)}))


def test_search_order(tmp_path: Path) -> None:
    """Fault: the order of DESIGN.md, section 4, or a store asked twice."""
    env = {**home_env(tmp_path), "DS_OPS_PATH": os.pathsep.join([str(tmp_path / "x"), str(tmp_path / "y")])}
    stores = search(Settings.read(env), tmp_path / "home", ("/p", "/p", "/base"))
    assert [(s.origin, str(s.root)) for s in stores] == [
        ("DS_OPS_PATH", str(tmp_path / "x")),
        ("DS_OPS_PATH", str(tmp_path / "y")),
        ("package", str(tmp_path / "home" / "parts")),
        ("share", str(Path("/p/share/deepspeed-ops"))),
        ("share", str(Path("/base/share/deepspeed-ops"))),
        ("jit", str(tmp_path / ".cache" / "torch_extensions" / "deepspeed_ops")),
    ]
    assert not (tmp_path / ".cache").exists()


def test_a_quarantine_holds_under_its_circumstances_only(tmp_path: Path) -> None:
    """Fault: a refused part is tried for ever; or a driver update does not lift the verdict of the old driver."""
    old = Marks(tmp_path, "driver 525")
    old.quarantine("abc", "no kernel image")
    assert Marks(tmp_path, "driver 525").quarantined("abc") == "no kernel image"
    assert Marks(tmp_path, "driver 525").quarantined("abd") is None
    assert Marks(tmp_path, "driver 580").quarantined("abc") is None


def test_a_quarantine_without_a_store_holds_in_memory(tmp_path: Path) -> None:
    """Fault: a read-only file system makes the chain try the same bad part again and again."""
    blocked = tmp_path / "file"
    blocked.touch()
    for marks in (Marks(None), Marks(blocked)):
        marks.quarantine("abc", "why")
        assert marks.quarantined("abc") == "why"


def test_a_first_use_that_never_came_back_is_seen_by_the_next_process(tmp_path: Path) -> None:
    """Fault: a part that kills its process kills every later one too."""
    child = os.fork() if hasattr(os, "fork") else pytest.skip("os.fork is missing: the death cannot be staged")
    if child == 0:
        with Marks(tmp_path).first_use("abc"):
            os._exit(9)
    os.waitpid(child, 0)
    with Marks(tmp_path).first_use("abc") as verdict:
        assert verdict == DIED
    with Marks(tmp_path).first_use("abc") as verdict:
        assert verdict == KNOWN


def test_first_use_marks(tmp_path: Path) -> None:
    """Fault: an exception counts as a crash; a part that loads is tried as new for ever; two at once wait."""
    with pytest.raises(ValueError, match="refused"), Marks(tmp_path).first_use("abc") as verdict:
        assert verdict == FRESH
        raise ValueError("refused")
    with Marks(tmp_path).first_use("abc") as verdict:
        assert verdict == FRESH
        got: list[str] = []

        def other() -> None:
            with Marks(tmp_path).first_use("abc") as second:
                got.append(second)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert got == [BUSY]
    with Marks(None).first_use("abc") as verdict:
        assert verdict == BUSY


def test_a_part_says_where_it_came_from(tmp_path: Path) -> None:
    """Fault: the report cannot tell a packaged part from one built here."""
    put(Store(tmp_path), host_manifest())
    (part,) = Store(tmp_path, "share").parts("toy")
    assert isinstance(part, Part) and part.origin == "share"
    assert dataclasses.replace(part, origin="jit") == Store(tmp_path).parts("toy")[0]


def test_a_death_is_seen_on_a_mount_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (NFS): where no lock can be had, a part that kills its process kills every later one too."""
    import filelock

    def no_locks(self: object, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    child = os.fork() if hasattr(os, "fork") else pytest.skip("os.fork is missing: the death cannot be staged")
    if child == 0:
        with Marks(tmp_path).first_use("abc"):
            os._exit(9)
    os.waitpid(child, 0)
    with Marks(tmp_path).first_use("abc") as verdict:
        assert verdict == DIED
        with Marks(tmp_path).first_use("abc") as second:  # the writer of the mark is this process, and lives
            assert second == BUSY
    with Marks(tmp_path).first_use("abc") as verdict:
        assert verdict == KNOWN


def test_unlike_hosts_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one node's part, verdict or crash marker stops another node of another CPU, driver or C library."""
    from op_builder.host import HostFacts
    from op_builder.resolve import Want, resolve
    from tests.toys import toy_spec

    store, name = Store(tmp_path), "aarch64"
    x86 = put(store, host_manifest())
    arm = put(store, host_manifest(variant="linux-aarch64", platform="linux-aarch64", key="a" * 64), b"for arm")
    hosts = {"x": HostFacts("linux", "x86_64", "glibc", (2, 36)), "a": HostFacts("linux", name, "glibc", (2, 31))}
    monkeypatch.setattr("op_builder.marks.socket.gethostname", lambda: "x")
    Marks(tmp_path).quarantine(x86.manifest.sha256, "it killed x")
    Marks(tmp_path)._write(arm.manifest.sha256, "trying", "x died in it", pid=1 << 22)
    monkeypatch.setattr("op_builder.marks.socket.gethostname", lambda: "a")
    marks = Marks(tmp_path)
    assert marks.quarantined(x86.manifest.sha256) is None
    with marks.first_use(arm.manifest.sha256) as verdict:
        assert verdict == FRESH
    want = Want("s" * 64, "tvm-ffi 0.1")
    for host, part in ((hosts["x"], x86), (hosts["a"], arm)):
        found = resolve(toy_spec(), host, None, store.parts("toy"), None, want)
        assert found.choice is not None and found.choice.part == part
