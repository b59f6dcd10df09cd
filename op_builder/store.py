"""Where built parts live: found ahead of time or made at run time, a part is one folder holding the file and its JSON.

Layout of every store, prebuilt or not::

    <root>/<op>/<variant>-<key>/<op>.<variant>.so        the part
    <root>/<op>/<variant>-<key>/<op>.<variant>.so.json   its manifest
    <root>/.work .locks .logs .marks                     a JIT store's own, never searched for parts

A folder appears at its final path only by one rename of a finished, fsynced private folder, so no reader ever sees half
a part. Locks spare work and nothing else: two builders that cannot see each other's lock still cannot hurt each other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CorruptPart, StoreError
from .files import FILES, Files
from .locks import Notify, hold
from .manifest import Manifest, read_manifest, write_manifest
from .settings import Settings

log = logging.getLogger("deepspeed_ops")

ORIGINS = ("DS_OPS_PATH", "package", "share", "jit")
_OURS = "deepspeed_ops"
_KEY_CHARS = 20  # 80 bits of the key in a folder name: Windows still counts 260 characters
_WORK_AGE_S = 24 * 3600  # a private folder this old belongs to nobody who still runs
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # no quotas on Windows
_warned: set[str] = set()


@dataclass(frozen=True)
class Part:
    """A part on disk: its file, what its manifest says, and which kind of store holds it."""

    path: Path
    manifest: Manifest
    origin: str


@dataclass(frozen=True)
class Unreadable:
    """A part folder whose manifest cannot be read; kept so that a trace can say so."""

    path: Path
    origin: str
    why: str


@dataclass(frozen=True)
class Workshop:
    """A builder's private folder: ``scratch`` for what a compiler leaves behind, ``part`` for what gets published."""

    scratch: Path
    part: Path


def verify(part: Part) -> None:
    """Compare a part's file with its manifest; to be called right before every load.

    A library cut short kills the process with SIGBUS when it is mapped, which nobody can catch: so look first.

    Raises:
        CorruptPart: the file is absent, or its size or digest differs.
    """
    part.manifest.verify(part.path)


def inspect(part: Part) -> None:
    """As :func:`verify`, for those who only look: the access time, by which old parts are told, stays as it was.

    Raises:
        CorruptPart: the file is absent, or its size or digest differs.
    """
    before: os.stat_result | None = None
    with contextlib.suppress(OSError):
        before = part.path.stat()
    verify(part)
    if before is not None:
        with contextlib.suppress(OSError):
            os.utime(part.path, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextlib.contextmanager
def store_errors(root: Path) -> Iterator[None]:
    """Turn what a file system refuses into a :class:`StoreError` that names the store and the way out."""
    try:
        yield
    except OSError as exc:
        fix = "set TORCH_EXTENSIONS_DIR to a writable folder on a disk with free space"
        full = exc.errno in _FULL
        what = f"part store {root} {'is full' if full else 'cannot be written'}"
        raise StoreError(what, f"{type(exc).__name__}: {exc}", fix) from exc


class Store:
    """One root folder with parts.

    Args:
        root: the folder; it need not exist.
        origin: one of :data:`ORIGINS`.
        logs: where the output of failed builds is kept; default: inside the store.
        files: renames and deletes.
    """

    def __init__(self, root: Path, origin: str = "jit", logs: Path | None = None, files: Files = FILES) -> None:
        self.root, self.origin, self._files = root, origin, files
        self._logs = root / ".logs" if logs is None else logs

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {self.origin!r})"

    def parts(self, op: str) -> tuple[Part | Unreadable, ...]:
        """Every part of an op that lies here, in the order of the folder names; reads manifests only."""
        found: list[Part | Unreadable] = []
        with contextlib.suppress(OSError):
            for folder in sorted((self.root / op).iterdir()):
                found.extend(self._read(path) for path in sorted(folder.glob("*.json")))
        return tuple(found)

    def find(self, op: str, variant: str, key: str) -> Part | None:
        """The part of exactly this key, verified; None where it is absent or damaged."""
        folder = self.final_folder(op, variant, key)
        for path in sorted(folder.glob("*.json")):
            part = self._read(path)
            if isinstance(part, Part) and part.manifest.key == key:
                with contextlib.suppress(CorruptPart):
                    verify(part)
                    return part
        return None

    @contextlib.contextmanager
    def workshop(self) -> Iterator[Workshop]:
        """A private folder inside the store (same file system, so that publishing is one rename), removed afterwards.

        Raises:
            StoreError: the store cannot be written.
        """
        root = self.root / ".work" / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        shop = Workshop(root / "scratch", root / "part")
        with store_errors(self.root):
            self._sweep()
            shop.scratch.mkdir(parents=True)
            shop.part.mkdir()
        try:
            yield shop
        except BaseException:
            self._files.remove_tree(root)
            raise
        self._files.remove_tree(shop.scratch)
        with contextlib.suppress(OSError):  # a loser's private copy stays: this process loads it
            root.rmdir()

    def publish(self, shop: Workshop, filename: str, manifest: Manifest) -> Part:
        """Give a finished part its final path by one rename.

        Args:
            shop: holds ``part/<filename>``.
            filename: name of the part's file.
            manifest: what is true of it, without size and digest: those are measured here.

        Returns:
            The published part; the other builder's where one was faster; the private copy where the file system
            lets neither be done.

        Raises:
            StoreError: disk full or no permission.
        """
        file = shop.part / filename
        with store_errors(self.root):
            manifest = manifest.with_file(file)
            described = shop.part / f"{filename}.json"
            write_manifest(described, manifest)
            for path in (file, described, shop.part):
                _fsync(path)
            final = self.final_folder(manifest.op, manifest.variant, manifest.key)
            final.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            try:
                self._files.rename(shop.part, final)
            except OSError as exc:
                if exc.errno in (*_FULL, errno.EROFS):
                    with store_errors(self.root):
                        raise
                winner = self.find(manifest.op, manifest.variant, manifest.key)
                if winner is not None:
                    self._files.remove_tree(shop.part)
                    return winner
                self.discard(final)
            else:
                _fsync(final.parent)
                return Part(final / filename, manifest, self.origin)
        log.info("part %s stays in its private folder: %s could not be taken", file, final)
        return Part(file, manifest, self.origin)

    def lock(self, name: str, notify: Notify | None = None) -> contextlib.AbstractContextManager[bool]:
        """Hold the lock ``name`` of this store; see :func:`op_builder.locks.hold`."""
        return hold(self.root / ".locks", name, notify)

    def log_path(self, name: str) -> Path:
        """Where the output of a failed build of ``name`` is kept."""
        return self._logs / f"{name}.log"

    def final_folder(self, op: str, variant: str, key: str) -> Path:
        """Where the part of this key stands once it is done."""
        return self.root / op / f"{variant}-{key[:_KEY_CHARS]}"

    def _read(self, path: Path) -> Part | Unreadable:
        try:
            manifest = read_manifest(path)
        except CorruptPart as exc:
            return Unreadable(path, self.origin, str(exc))
        return Part(path.parent / manifest.filename, manifest, self.origin)

    def discard(self, folder: Path) -> bool:
        """Free a final path by one rename, then delete; a reader who has a file open keeps it. False: it is held."""
        target = self.root / ".work" / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.rename(folder, target)
            self._files.remove_tree(target)
        return not folder.exists()

    def _sweep(self) -> None:
        work = self.root / ".work"
        with contextlib.suppress(OSError):
            for entry in work.iterdir():
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _WORK_AGE_S:
                        shutil.rmtree(entry, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Push a file or folder to the disk; a file system that cannot is no reason to fail a build."""
    if sys.platform == "win32" and path.is_dir():
        return  # a folder has no handle to flush there
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def default_extensions_dir(env: Mapping[str, str], system: str = sys.platform) -> Path | None:
    """torch's default folder for extensions; None where no home folder is known.

    ``/`` as home (a container's user without a passwd entry) counts as none.
    """
    home = env.get("USERPROFILE" if system == "win32" else "HOME", "")
    if not home and system != "win32":
        with contextlib.suppress(RuntimeError, KeyError):
            home = str(Path("~").expanduser())
    known = bool(home) and home != "~" and Path(home).is_absolute() and Path(home) != Path(home).parent
    if system == "win32":
        local = env.get("LOCALAPPDATA", "")
        base = Path(local) if local else Path(home, "AppData", "Local") if known else None
        return base / "torch_extensions" / "torch_extensions" / "Cache" if base else None
    if system == "darwin":
        return Path(home, "Library", "Caches", "torch_extensions") if known else None
    cache = env.get("XDG_CACHE_HOME", "")
    if cache:
        return Path(cache, "torch_extensions")
    return Path(home, ".cache", "torch_extensions") if known else None


def _temporary_roots(env: Mapping[str, str]) -> Iterator[Path]:
    """Where a folder of this user alone would stand; equal for every process of the user, so that ranks share it."""
    uid = os.getuid() if hasattr(os, "getuid") else env.get("USERNAME", "user")
    for place in [env.get(v, "") for v in ("TMPDIR", "TEMP", "TMP")] + ["/tmp", "/var/tmp", "/dev/shm"]:
        # Not tempfile.gettempdir(): its last resort is the current folder.
        if place and Path(place).is_absolute() and Path(place).is_dir():
            yield Path(place, f"{_OURS}-{uid}")


def _make_temporary_root(env: Mapping[str, str]) -> Path | None:
    for root in _temporary_roots(env):
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(root):  # someone else took the name first
                root = Path(tempfile.mkdtemp(prefix=f"{_OURS}-", dir=root.parent))
            if not _writable(root):
                return root
    return None


def _is_ours(root: Path) -> bool:
    """Whether only this user can write there: a library put there by someone else would run as us."""
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return False
    return not hasattr(os, "getuid") or (facts.st_uid == os.getuid() and not facts.st_mode & 0o022)


def _writable(root: Path) -> str:
    """Empty where libraries can be made under ``root`` and loaded from it, else the reason."""
    probe = root / f".probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        forbids = os.statvfs(root).f_flag & os.ST_NOEXEC if hasattr(os, "statvfs") and hasattr(os, "ST_NOEXEC") else 0
    except OSError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "it is mounted noexec, so no library can be loaded from it" if forbids else ""


def jit_store(settings: Settings) -> Store:
    """The store that run-time builds go to, made if need be.

    ``TORCH_EXTENSIONS_DIR`` if set, else torch's default, in a folder of our own; where that default cannot be
    written, a private temporary folder and one warning. Never the current folder, never ``/``.

    Raises:
        StoreError: ``TORCH_EXTENSIONS_DIR`` cannot be written, or nothing can.
    """
    fix = "set TORCH_EXTENSIONS_DIR to a writable folder"
    if settings.extensions_dir is not None:
        root = settings.extensions_dir.absolute() / _OURS
        if why := _writable(root):
            raise StoreError(f"TORCH_EXTENSIONS_DIR={settings.extensions_dir} cannot hold built parts", why, fix)
        return Store(root)
    base = default_extensions_dir(settings.env)
    why = _writable(base / _OURS) if base else "no home folder is known (HOME is unset, this user has no passwd entry)"
    if base and not why:
        return Store(base / _OURS)
    temporary = _make_temporary_root(settings.env)
    if temporary is None:
        raise StoreError("no folder for built parts", f"{why}; no temporary folder can be written either", fix)
    message = f"built parts go to {temporary} and may be lost at reboot ({why}): {fix}"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return Store(temporary)


def search(
    settings: Settings, home: Path, prefixes: Sequence[str] = (sys.prefix, sys.base_prefix)
) -> tuple[Store, ...]:
    """The stores to look for parts in, in order; makes no folder and warns of nothing.

    Args:
        settings: for ``DS_OPS_PATH``, ``TORCH_EXTENSIONS_DIR`` and the home folder.
        home: the checkout or the installed package, which holds ``parts``.
        prefixes: where ``share/deepspeed-ops`` is looked for.
    """
    stores = [Store(path, "DS_OPS_PATH") for path in settings.ops_path]
    stores.append(Store(home / "parts", "package"))
    stores.extend(Store(Path(p, "share", "deepspeed-ops"), "share") for p in prefixes)
    if settings.extensions_dir is not None:
        stores.append(Store(settings.extensions_dir.absolute() / _OURS))
    else:
        base = default_extensions_dir(settings.env)
        stores.extend([Store(base / _OURS)] if base else [])
        stores.extend(Store(root) for root in _temporary_roots(settings.env) if root.is_dir() and _is_ours(root))
    unique: dict[Path, Store] = {}
    for store in stores:
        unique.setdefault(store.root, store)
    return tuple(unique.values())
