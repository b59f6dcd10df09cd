"""Renaming and deleting where somebody else holds the file: Windows refuses what POSIX allows, often for a moment only.

On Windows a virus scanner or an indexer opens every new file for some milliseconds, a deleted file keeps its name until
its last handle is closed (delete-pending), a folder cannot be renamed while a file in it is open, and a loaded DLL
cannot be deleted at all. So each call here is tried again for a bounded time and then fails like the call itself; what
is merely untidy is left behind instead of failing a build.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

# ACCESS_DENIED (also: delete-pending), SHARING_VIOLATION, LOCK_VIOLATION, DIR_NOT_EMPTY (its last file is going).
_HELD = frozenset({5, 32, 33, 145})
# 10, 20, 40 ... 640 ms: 1.3 s in all. A scanner is done with a library of some 100 KB within a tenth of that; a
# process that has loaded the file does not let go at all, and waiting longer for it helps nobody.
_PAUSES_S = tuple(0.01 * 2**n for n in range(7))


@dataclass(frozen=True)
class Files:
    """The file system as builders use it.

    Attributes:
        windows: whether a refusal can be a matter of a moment.
        sleep: waits for so many seconds.
        rename_once: tries to rename.
        replace_once: tries to rename over what has the name.
        unlink_once: tries to delete a file.
        rmtree_once: tries to delete a folder with all it holds; deletes what it can.
    """

    windows: bool = sys.platform == "win32"
    sleep: Callable[[float], None] = time.sleep
    rename_once: Callable[[Path, Path], object] = lambda source, target: source.rename(target)
    replace_once: Callable[[Path, Path], object] = lambda source, target: source.replace(target)
    unlink_once: Callable[[Path], object] = lambda path: path.unlink()
    rmtree_once: Callable[[Path], object] = lambda folder: delete_all(folder)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder a name that nobody has.

        Raises:
            FileExistsError: the name is taken (POSIX also says ENOTEMPTY for folders).
            OSError: it was refused to the end.
        """
        # A taken name is an answer, not a moment: on Windows it can come as ACCESS_DENIED.
        self._patiently(lambda: self.rename_once(source, target), lambda: not target.exists())

    def replace(self, source: Path, target: Path) -> None:
        """Give a file a name, whoever has it.

        Raises:
            OSError: it was refused to the end; on Windows also where somebody has ``target`` open.
        """
        self._patiently(lambda: self.replace_once(source, target))

    def remove(self, path: Path) -> bool:
        """Delete a file; False where it is still there, because somebody holds it. Never raises."""
        try:
            self._patiently(lambda: self.unlink_once(path))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def remove_tree(self, folder: Path) -> bool:
        """Delete a folder with all it holds; False where something of it is still there. Never raises."""
        with contextlib.suppress(OSError):
            if folder.exists():
                self._patiently(lambda: self.rmtree_once(folder))
        return not folder.exists()

    def write_text(self, path: Path, text: str) -> None:
        """Write a small file whole: readers see the old text or the new one.

        Raises:
            OSError: it was refused to the end.
        """
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(text, encoding="utf-8")
        try:
            self.replace(fresh, path)
        except OSError:
            self.remove(fresh)
            raise

    def _patiently(self, action: Callable[[], _T], worth_waiting: Callable[[], bool] = lambda: True) -> _T:
        for pause in _PAUSES_S if self.windows else ():
            try:
                return action()
            except OSError as exc:
                if not held(exc) or not worth_waiting():
                    raise
            self.sleep(pause)
        return action()


def delete_all(folder: Path) -> None:
    """Delete a folder and all of it that can be deleted.

    Raises:
        OSError: what stopped the first file that is still there.
    """
    failures: list[OSError] = []

    def note(call: object, path: str, failed: Any) -> None:
        exc = failed if isinstance(failed, BaseException) else failed[1]
        if isinstance(exc, OSError) and not isinstance(exc, FileNotFoundError):
            failures.append(exc)

    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=note)
    else:
        shutil.rmtree(folder, onerror=note)
    if failures:
        raise failures[0]


def held(exc: OSError) -> bool:
    """Whether an error says that somebody holds the file now, as Windows puts it."""
    code = getattr(exc, "winerror", None)
    if code is not None:
        return code in _HELD
    return isinstance(exc, PermissionError) or exc.errno == errno.ENOTEMPTY


FILES = Files()
