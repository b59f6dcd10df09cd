"""The host's pip settings, as an image build may have them: how to reach an index, no folder of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CARRIED = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")


@dataclass(frozen=True)
class PipSettings:
    """Text of a pip.conf, and the file of certificates it needs (None: the image's own do)."""

    conf: str
    ca: Path | None


def read(env: Mapping[str, str]) -> PipSettings:
    """What pip on this host says of itself."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], env=dict(env), stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", errors="replace", timeout=60, check=False,
    )  # fmt: skip
    return of_listing(done.stdout, env)


def of_listing(text: str, env: Mapping[str, str]) -> PipSettings:
    """From the output of ``pip config list``."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2] if name.startswith(("global.", ":env:.")) else ""
        if key in _CARRIED or key == "cert":
            found[key] = value.strip().strip("'\"")
    for key in ("index-url", "extra-index-url"):
        urls = [url for url in found.get(key, "").split() if url.startswith("http")]
        found.pop(key, None)
        if urls:
            found[key] = " ".join(urls)
    ca = found.pop("cert", None) or env.get("PIP_CERT") or env.get("SSL_CERT_FILE")
    lines = ["[global]", *(f"{key} = {value}" for key, value in found.items())]
    if ca and Path(ca).is_file():
        lines.append("cert = /run/secrets/pip_ca")
        return PipSettings("\n".join(lines) + "\n", Path(os.path.realpath(ca)))
    return PipSettings("\n".join(lines) + "\n", None)
