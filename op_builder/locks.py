"""One builder at a time, where the file system can lock; a lock spares work and is never a condition for correctness.

OS locks (through ``filelock``) die with their holder, so a killed builder blocks nobody and an old ``lock`` file on
disk means nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger("deepspeed_ops")

Notify = Callable[[str], None]


@contextlib.contextmanager
def hold(
    folder: Path, name: str, notify: Notify | None = None, *, patience_s: float = 3.0, limit_s: float = 1800.0
) -> Iterator[bool]:
    """Hold the lock ``name`` in ``folder``.

    Args:
        folder: made if need be.
        name: what is built.
        notify: told once, after ``patience_s``, what is waited for and who holds it.
        patience_s: seconds of silent waiting.
        limit_s: seconds after which the waiter goes on without the lock.

    Yields:
        True with the lock held; False where this file system has no locks or the holder took too long.
    """
    lock = _acquire(folder, name, notify, patience_s, limit_s)
    if lock is None:
        yield False
        return
    holder = _holder(folder, name)
    try:
        with contextlib.suppress(OSError):
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%H:%M:%S")}
            holder.write_text(json.dumps(who), encoding="utf-8")
        yield True
    finally:
        with contextlib.suppress(OSError):  # a waiter may be reading it: then it stays, and says too much
            holder.unlink()
        lock.release()


def try_now(path: Path) -> BaseFileLock | None:
    """Take a lock that nobody holds; None where somebody does or locks do not work here."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path))
        lock.acquire(timeout=0)
    except (Timeout, OSError, RuntimeError):
        return None
    return lock


def _acquire(folder: Path, name: str, notify: Notify | None, patience_s: float, limit_s: float) -> BaseFileLock | None:
    from filelock import FileLock, Timeout

    path = folder / f"{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path))
        try:
            lock.acquire(timeout=patience_s)
        except Timeout:
            message = f"waiting for another process to build {name}: lock {path}, held by {_who(folder, name)}"
            log.warning("%s", message)
            if notify is not None:
                notify(message)
            lock.acquire(timeout=limit_s)
    except Timeout:
        log.warning("no longer waiting for lock %s after %.0f s: building a private copy", path, limit_s)
        return None
    except (OSError, RuntimeError) as exc:  # RuntimeError: how filelock says that a file system has no locks
        log.info("no lock on %s (%s): building without", path, exc)
        return None
    return lock


def _holder(folder: Path, name: str) -> Path:
    return folder / f"{name}.holder"


def _who(folder: Path, name: str) -> str:
    try:
        who = json.loads(_holder(folder, name).read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that left no name"
