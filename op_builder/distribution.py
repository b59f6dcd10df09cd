"""Which distribution this is, whether a conda environment or a container lies around us: for commands to paste."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Manager by ID or ID_LIKE of os-release.
_MANAGERS = {
    **dict.fromkeys(("debian", "ubuntu"), "apt"),
    **dict.fromkeys(("rhel", "fedora", "centos", "rocky", "almalinux", "amzn", "ol"), "dnf"),
    **dict.fromkeys(("suse", "sles", "opensuse", "opensuse-leap", "opensuse-tumbleweed"), "zypper"),
    **dict.fromkeys(("arch", "manjaro"), "pacman"),
    "alpine": "apk",
}


@dataclass(frozen=True)
class Distribution:
    """Where commands are pasted.

    Attributes:
        id: ``debian``, ``rocky``; ``windows`` or ``macos`` elsewhere.
        name: for people.
        manager: ``apt``, ``dnf``, ``zypper``, ``pacman``, ``apk`` or ``""``.
        conda: prefix of the conda environment whose Python this is; ``""`` outside one.
        container: ``docker``, ``podman``, ``kubernetes`` or ``""``.
        root: whether commands need no ``sudo``.
        python: how this Python is called in a command.
    """

    id: str
    name: str
    manager: str = ""
    conda: str = ""
    container: str = ""
    root: bool = False
    python: str = "python"


def read_distribution(
    env: Mapping[str, str],
    *,
    root: Path = Path("/"),
    system: str = sys.platform,
    prefix: str = sys.prefix,
    uid: int | None = None,
) -> Distribution:
    """Look. Never raises.

    Args:
        env: environment variables.
        root: where the file system starts.
        system: Python's ``sys.platform``.
        prefix: Python's ``sys.prefix``.
        uid: of the user; default: this process's.
    """
    conda = prefix if (Path(prefix) / "conda-meta").is_dir() else ""
    if system != "linux":
        name = {"win32": "windows", "darwin": "macos"}.get(system, system)
        return Distribution(name, {"windows": "Windows", "macos": "macOS"}.get(name, name), conda=conda)
    facts = os_release(root)
    ids = [facts.get("ID", ""), *facts.get("ID_LIKE", "").split()]
    manager = next((_MANAGERS[i] for i in ids if i in _MANAGERS), "")
    user = uid if uid is not None else os.geteuid() if hasattr(os, "geteuid") else 1
    name = facts.get("PRETTY_NAME", ids[0] or "Linux")
    return Distribution(ids[0] or "linux", name, manager, conda, container_of(env, root), user == 0)


def os_release(root: Path = Path("/")) -> dict[str, str]:
    """``/etc/os-release``, else ``/usr/lib/os-release``, as a dictionary; empty where neither can be read."""
    for place in ("etc/os-release", "usr/lib/os-release"):
        with contextlib.suppress(OSError):
            text = (root / place).read_text(encoding="utf-8", errors="replace")
            pairs = re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE)
            return {key: value.strip().strip("\"'") for key, value in pairs}
    return {}


def container_of(env: Mapping[str, str], root: Path = Path("/")) -> str:
    """Which kind of container this process runs in; empty outside one, or where it cannot be told."""
    if env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    with contextlib.suppress(OSError):
        if (root / "run/.containerenv").exists():
            return "podman"
        if (root / ".dockerenv").exists():
            return "docker"
    kind = env.get("container", "")
    return {"podman": "podman", "docker": "docker"}.get(kind, "docker" if kind == "oci" else "")
