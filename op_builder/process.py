"""What this process has loaded and where it runs: one state, whatever name this package was imported under."""

from __future__ import annotations

import os
import platform
import sys
import threading
import types
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import faults
from .errors import HostUnsupported
from .host import HostFacts, c_library
from .tested import NEWEST_PYTHON

if TYPE_CHECKING:
    from .gpus import Device

_STATE_MODULE = "_deepspeed_ops_process_state"


@dataclass
class ProcessState:
    """What this process has loaded."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    op_locks: dict[str, threading.RLock] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    images: dict[tuple[str, int], bytes] = field(default_factory=dict)
    image_devices: dict[tuple[str, int], tuple[Device, tuple[int, int]]] = field(default_factory=dict)
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ffi_ready: bool = False
    python_checked: bool = False

    def op_lock(self, op: str) -> threading.RLock:
        """One op's loading waits for nobody else's compiler."""
        with self.lock:
            return self.op_locks.setdefault(op, threading.RLock())

    def renew_locks(self) -> None:
        """After a fork: another thread of the parent may have held a lock that no thread here will release."""
        self.lock = threading.RLock()
        self.op_locks = {}


def process_state() -> ProcessState:
    """The one state of this process, also where this package is imported under two names."""
    module = sys.modules.get(_STATE_MODULE)
    if module is None:
        module = sys.modules.setdefault(_STATE_MODULE, types.ModuleType(_STATE_MODULE, "State of deepspeed_ops."))
    state = module.__dict__.setdefault("state", None)
    if state is None:
        state = module.__dict__["state"] = ProcessState()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=state.renew_locks)
    found: ProcessState = state
    return found


def check_python(
    state: ProcessState,
    *,
    wide: bool = sys.maxsize > 2**32,
    version: tuple[int, int] = sys.version_info[:2],
    newest: tuple[int, int] = NEWEST_PYTHON,
) -> None:
    """Refuse a Python that loads no part at all; warn once of one that nobody tried.

    Args:
        state: remembers that this was done.
        wide: whether addresses have 64 bits.
        version: of this Python.
        newest: the newest one tested.

    Raises:
        HostUnsupported: a 32-bit Python.
    """
    if not wide:
        problem = faults.python_is_32_bit(platform_facts().platform, newest)
        raise HostUnsupported(problem.what, problem.why, problem.fix)
    if version > newest and not state.python_checked:
        problem = faults.python_is_untested(version, newest)
        warnings.warn(f"{problem.what}: {problem.why}; {problem.fix}", RuntimeWarning, stacklevel=4)
    state.python_checked = True


def platform_facts() -> HostFacts:
    """What a host library depends on, in microseconds: asks no GPU and reads no CPU features."""
    system = {"win32": "windows", "darwin": "macos"}.get(sys.platform, sys.platform)
    machine = platform.machine().lower()
    libc, version = c_library() if system == "linux" else ("", ())
    return HostFacts(
        system, {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(machine, machine), libc, version
    )
