"""The structures of ``csrc/async_io/export.h``, field by field, and what an outcome means as an exception."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from deepspeed_ops.op_builder.errors import IoFailed, UsageError

BACKENDS = {"auto": 0, "threads": 1, "libaio": 2, "io_uring": 3}
SHORT_FILE = -1
MOST = 2**63 - 1


def _words(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class QueueArgs(ctypes.Structure):
    """``ds::aio::QueueArgs``."""

    _fields_ = _words("block", "depth", "lanes", "single_submit", "backend")


class Outcome(ctypes.Structure):
    """``ds::aio::OutcomeArgs``."""

    code: int
    at: int
    moved: int
    call: bytes
    _fields_ = [*_words("code", "at", "moved"), ("call", ctypes.c_char * 256)]


class FileArgs(ctypes.Structure):
    """``ds::aio::FileArgs``."""

    file: int
    is_direct: int
    alignment: int
    memory_alignment: int
    outcome: Outcome
    _fields_ = [
        *_words("path", "descriptor", "write", "direct", "file", "is_direct", "alignment", "memory_alignment"),
        ("outcome", Outcome),
    ]


class RequestArgs(ctypes.Structure):
    """``ds::aio::RequestArgs``."""

    outcome: Outcome
    _fields_ = [
        *_words("queue", "file", "write", "data", "bytes", "offset", "sync", "device", "stream"),
        ("outcome", Outcome),
    ]


def whole(op: str, name: str, value: Any, least: int) -> int:
    """An argument that must be a whole number of at least ``least`` and fit 63 bits.

    Raises:
        UsageError: it is not.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{op}: {name}={value!r} is a {type(value).__name__}", "expected a whole number", "")
    number = int(value.__index__())
    if not least <= number <= MOST:
        raise UsageError(f"{op}: {name}={number}", f"expected at least {least} and less than 2**63", "")
    return number


def backend_code(op: str, asked: str | None) -> int:
    """The number of a backend: the one asked for, else that of ``DS_AIO_BACKEND``, else ``auto``.

    Raises:
        UsageError: no backend has this name.
    """
    said = asked if asked is not None else os.environ.get("DS_AIO_BACKEND", "").strip() or "auto"
    if said not in BACKENDS:
        source = "backend" if asked is not None else "DS_AIO_BACKEND"
        raise UsageError(f"{op}: {source}={said!r} names no backend", f"expected one of {', '.join(BACKENDS)}", "")
    return BACKENDS[said]


_FIXES = {
    errno.ENOSPC: "free space there, or write elsewhere",
    errno.EACCES: "check the owner and the mode of the file and its folder",
    errno.ENOENT: "check the path",
    errno.EISDIR: "name a file",
    errno.EMFILE: "ulimit -n 65536",
}


def failed(op: str, what: str, path: str, offset: int, length: int, outcome: Outcome) -> IoFailed:
    """The exception for an outcome that is not 0.

    Args:
        op: the op.
        what: ``read``, ``write`` or ``open``.
        path: the file, or what is known of a descriptor.
        offset: of the request, bytes.
        length: of the request, bytes.
        outcome: what the library told.
    """
    call = outcome.call.decode("utf-8", "replace")
    asked = (
        f"{op}: {what} of {path}" if what == "open" else f"{op}: {what} of {length} bytes at offset {offset} of {path}"
    )
    if outcome.code == SHORT_FILE:
        code = getattr(errno, "ENODATA", errno.EIO)
        why = f"ENODATA: the file ends at byte {outcome.at}"
        fix = "read less, or write the file whole"
    else:
        code = int(outcome.code)
        place = f" at byte {outcome.at}" if outcome.at >= 0 else ""
        why = f"{errno.errorcode.get(code, code)}: {os.strerror(code)} ({call}{place})"
        fix = _FIXES.get(code, "")
    return IoFailed(asked, why, fix, errno=code, filename=path, offset=offset, length=length)
