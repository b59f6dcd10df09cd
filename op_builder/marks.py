"""What this host learned about parts by loading them: which load, which are refused, which kill the process.

A mark belongs to a part's content (its sha256) *and* to the circumstances (host name, driver, TVM-FFI release): a part
that an old driver refuses is tried again after the driver was updated, and a home folder shared by unlike hosts keeps
their verdicts apart. Marks are hints: where they cannot be written, nothing else changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from .files import FILES
from .locks import try_now

KNOWN, FRESH, DIED, BUSY = "known", "fresh", "died", "busy"


class Marks:
    """Verdicts of this host.

    Args:
        root: a JIT store's root, None where none can be written.
        circumstances: what else a verdict depends on (driver and TVM-FFI versions).
        memory: verdicts of this process, kept also where nothing can be written.
    """

    def __init__(self, root: Path | None, circumstances: str = "", memory: dict[str, str] | None = None) -> None:
        self._folder = None if root is None else root / ".marks"
        self._where = f"{socket.gethostname()}|{circumstances}"
        self._memory: dict[str, str] = {} if memory is None else memory

    def quarantine(self, sha256: str, why: str) -> None:
        """Never offer this part again under these circumstances."""
        self._memory[sha256] = why
        self._write(sha256, "refused", why)

    def quarantined(self, sha256: str) -> str | None:
        """Why a part was quarantined; None where it was not."""
        if sha256 in self._memory:
            return self._memory[sha256]
        path = self._path(sha256, "refused")
        if path is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return str(json.loads(path.read_text(encoding="utf-8"))["why"])
        return None

    @contextlib.contextmanager
    def first_use(self, sha256: str) -> Iterator[str]:
        """Bracket a part's first load on this host, so that the next process learns if this one dies in it.

        Yields:
            ``known``: it loaded here before. ``fresh``: nobody tried. ``died``: the last process that tried never
            came back. ``busy``: another process tries at this moment, or there is no place for marks.
        """
        done, trying = self._path(sha256, "loads"), self._path(sha256, "trying")
        if done is None or trying is None or done.exists():
            yield KNOWN if done is not None and done.exists() else BUSY
            return
        lock = try_now(trying.with_suffix(".lock"))
        # Without a lock (another process holds it, or this mount has none) the mark's own text tells who wrote it.
        died = trying.exists() if lock is not None else _writer_is_dead(trying)
        if lock is None and not died and trying.exists():
            yield BUSY
            return
        try:
            self._write(sha256, "trying", "a process is loading this part, or died doing so", pid=os.getpid())
            failed = True
            try:
                yield DIED if died else FRESH
                failed = False
            finally:
                # An exception is an answer too: only a process that never comes back leaves the mark behind. A
                # scanner that has the file open must not look like that.
                FILES.remove(trying)
            if not failed:
                self._write(sha256, "loads", "")
        finally:
            if lock is not None:
                lock.release()

    def _path(self, sha256: str, verdict: str) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(f"{sha256}|{self._where}".encode()).hexdigest()[:32]
        return self._folder / f"{name}.{verdict}.json"

    def _write(self, sha256: str, verdict: str, why: str, **more: int) -> None:
        path = self._path(sha256, verdict)
        if path is None:
            return
        facts = {"part": sha256, "where": self._where, "why": why, **more}
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(facts), encoding="utf-8")


def _writer_is_dead(mark: Path) -> bool:
    """Whether the process of this host that wrote a mark is gone; False where that cannot be told."""
    if sys.platform == "win32":  # there os.kill(pid, 0) ends the process
        return False
    try:
        os.kill(int(json.loads(mark.read_text(encoding="utf-8"))["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return False
