"""NVRTC, NVIDIA's run-time compiler, through ctypes: GPU code without nvcc, host compiler or toolkit.

The library is opened for itself (``RTLD_LOCAL``), its builtins of the same release by full path before it, because
wheels of CUDA 13 do not tell the linker where they lie. Machine code is asked for as machine code: PTX of a newer
release than the driver would be refused by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cuda_toolkits import Nvrtc
from .errors import ArchListError, CompileFailed, CompilerMissing
from .matrix import dotted
from .targets import Target, capability_of

_SUCCESS, _COMPILATION = 0, 6
_LOCK = threading.Lock()


@contextlib.contextmanager
def _kept_locale() -> Iterator[None]:
    """NVRTC 12.1 leaves the calling thread in the "C" locale, where Python's ``open()`` reads ASCII: put it back."""
    try:
        uselocale = ctypes.CDLL(None).uselocale
    except (OSError, AttributeError, TypeError):  # Windows: no such function, and no such fault
        yield
        return
    uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


class NvrtcFailed(CompileFailed):
    """NVRTC refused a source or a target; ``output`` is its whole log as text, which no file holds yet."""

    def __init__(self, what: str, why: str, fix: str, output: str) -> None:
        super().__init__(what, why, fix)
        self.output = output


class NvrtcLibrary:
    """An opened NVRTC.

    Attributes:
        version: the release the library itself states, ``(12, 8)``.
        archs: plain machine-code targets it supports, by its own list.
        path: the library.
    """

    def __init__(self, found: Nvrtc) -> None:
        self.path = found.library
        self._held = _open(found)
        library = self._held[-1]
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version: tuple[int, int] = (major.value, minor.value)
        self.archs: tuple[Target, ...] = tuple(Target(*capability_of(n)) for n in self._supported())

    def compile(
        self,
        source: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        *,
        target: Target | None = None,
    ) -> tuple[bytes, str]:
        """Compile one source for one target.

        Args:
            source: CUDA C++.
            name: file name for messages.
            headers: text of every file the source includes, by the name the directive spells.
            options: further flags.
            target: what to compile for; None: the ``--gpu-architecture`` (``-arch``) among ``options``.

        Returns:
            Cubin bytes for machine code, PTX text (ASCII, without a final zero) for PTX; and the compiler's log.

        Raises:
            NvrtcFailed: the compiler refused the source or the target; ``why`` is its first error line.
            ArchListError: no target is given.
        """
        if target is None:
            target = target_of(options)
        else:
            options = (f"-arch={target.code}", *options)
        library, program = self._library, ctypes.c_void_p()
        known = dict(headers or {})
        texts = (ctypes.c_char_p * max(1, len(known)))(*(t.encode() for t in known.values()))
        names = (ctypes.c_char_p * max(1, len(known)))(*(n.encode() for n in known))
        made = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), len(known), texts, names
        )
        self._check(made, "nvrtcCreateProgram")
        try:
            argv = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            with _kept_locale():
                status = library.nvrtcCompileProgram(program, len(options), argv)
            log = self._text(program, "nvrtcGetProgramLog", "nvrtcGetProgramLogSize")
            if status != _SUCCESS:
                raise self._failure(status, name, target, options, log)
            if target.kind == "sass":
                return self._bytes(program, "nvrtcGetCUBIN", "nvrtcGetCUBINSize"), log
            return self._bytes(program, "nvrtcGetPTX", "nvrtcGetPTXSize").rstrip(b"\0"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _supported(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers), "nvrtcGetSupportedArchs")
        return tuple(sorted(set(numbers)))

    def _bytes(self, program: ctypes.c_void_p, get: str, get_size: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, get_size)(program, ctypes.byref(size)), get_size)
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._check(getattr(self._library, get)(program, buffer), get)
        return buffer.raw[: size.value]

    def _text(self, program: ctypes.c_void_p, get: str, get_size: str) -> str:
        return self._bytes(program, get, get_size).rstrip(b"\0").decode("utf-8", "replace")

    def _failure(self, status: int, name: str, target: Target, flags: Sequence[str], log: str) -> NvrtcFailed:
        what = f"nvrtc {dotted(self.version)} {' '.join(flags)} cannot compile {name}"
        why, fix = first_error(log) or self._message(status), ""
        if status != _COMPILATION and all(a.capability != target.capability for a in self.archs):
            why = f"it targets {', '.join(a.code for a in self.archs)}"
            fix = "install the NVRTC of a release that has this architecture, or choose another architecture"
        return NvrtcFailed(what, why, fix, log)

    def _message(self, status: int) -> str:
        text = self._library.nvrtcGetErrorString(status)
        return text.decode("utf-8", "replace") if text else f"status {status}"

    def _check(self, status: int, call: str) -> None:
        if status != _SUCCESS:
            raise CompileFailed(f"{call} of {self.path} failed", self._message(status), "install NVRTC again")


def target_of(options: Sequence[str]) -> Target:
    """The target an option list names.

    >>> target_of(["--fmad=true", "--gpu-architecture=sm_90a"]).variant
    'sm90a'

    Raises:
        ArchListError: it names none.
    """
    for option in reversed(options):
        match = re.fullmatch(r"(?:--gpu-architecture|-arch)=(sm|compute)_(\d+[af]?)", option)
        if match is not None:
            return Target.from_variant(("sm" if match[1] == "sm" else "ptx") + match[2])
    raise ArchListError(
        "no GPU target was given", f"the options are {' '.join(options) or '(none)'}", "pass --gpu-architecture=sm_NN"
    )


def first_error(log: str) -> str:
    """The first real error line of a compiler's log; ``""`` where there is none.

    >>> first_error('a.cu(3): warning #1: x\\na.cu(7): error: identifier "y" is undefined\\n1 error detected')
    'a.cu(7): error: identifier "y" is undefined'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if re.search(
            r"\b(catastrophic error|fatal error|error)\b\s*(#\S+\s*)?:|^nvrtc: error|^ptxas fatal|^ptxas error", line
        ):
            return line
    return next((line for line in lines if "error" in line.lower()), "")


def _open(found: Nvrtc) -> list[Any]:
    # The loader is asked for the builtins by name while a compilation runs: a copy held by full path answers.
    held: list[Any] = []
    try:
        with _LOCK:
            if os.name == "nt":
                add: Any = getattr(os, "add_dll_directory", None)
                held.append(add(str(found.library.parent)))
            if found.builtins is not None:
                held.append(ctypes.CDLL(str(found.builtins), mode=_local()))
            held.append(ctypes.CDLL(str(found.library), mode=_local()))
    except OSError as exc:
        raise CompilerMissing(
            f"NVRTC {found.library} does not load",
            str(exc),
            "install it again: pip install --force-reinstall its wheel",
        ) from exc
    return held


def _local() -> int:
    return getattr(os, "RTLD_NOW", 0) | getattr(os, "RTLD_LOCAL", 0)


@functools.cache
def _opened(library: Path, found: Nvrtc) -> NvrtcLibrary:
    return NvrtcLibrary(found)


def open_nvrtc(found: Nvrtc) -> NvrtcLibrary:
    """Open an NVRTC, once per process and library.

    Raises:
        CompilerMissing: the library does not load.
    """
    return _opened(found.library, found)
