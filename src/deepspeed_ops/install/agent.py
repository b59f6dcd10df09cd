"""What runs on a host: look, check the copied wheel, install it, report. Standard library only.

It arrives as text on the command line and answers in lines that survive whatever a login shell prints around them:
``ds_install:<base64>``, joined and decoded into one JSON object.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "ds_install:"
LINE = 900  # characters: pdsh cuts long lines
_PATIENCE_S = 3600.0

Order = dict[str, Any]
Facts = dict[str, Any]


def answer(facts: Facts) -> None:
    """Print the one answer."""
    text = base64.b64encode(json.dumps(facts).encode("utf-8")).decode("ascii")
    pieces = [MARK + text[start : start + LINE] for start in range(0, len(text), LINE)]
    sys.stdout.write("\n" + "\n".join(pieces) + "\n")
    sys.stdout.flush()


def installed(names: Sequence[str]) -> dict[str, Facts]:
    """Version of each distribution, and sha256 of the wheel it came from, as pip recorded it."""
    found = {}
    for name in names:
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        record = next((file for file in dist.files or () if file.name == "direct_url.json"), None)
        try:
            origin = json.loads(record.read_text(encoding="utf-8")).get("archive_info", {}) if record else {}
        except (ValueError, OSError):
            origin = {}
        sha256 = origin.get("hashes", {}).get("sha256", "") or origin.get("hash", "").removeprefix("sha256=")
        found[name] = {"version": dist.version, "sha256": sha256}
    return found


def folder_for(key: str) -> Path:
    """A folder of this user alone for the copy; the same one at every run, so that leavings are found again.

    Raises:
        OSError: it cannot be made, or somebody else made it.
    """
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    own = Path(tempfile.gettempdir(), f"deepspeed_wheels-{user}")
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and own.lstat().st_uid != os.getuid():
        raise OSError(f"{own} belongs to somebody else")
    folder = own / key
    folder.mkdir(exist_ok=True)
    return folder


def look(order: Order) -> Facts:
    """Before anything is copied: whether this host can take the wheel, and where to."""
    if importlib.util.find_spec("pip") is None:
        return {"error": f"{sys.executable} has no pip", "fix": f"{sys.executable} -m ensurepip"}
    present = installed(order["names"])
    if any(facts["sha256"] == order["sha256"] for facts in present.values()):
        return {"installed": present, **report(order)}  # nothing to do here: answer at once
    folder = folder_for(order["sha256"][:16])
    free = shutil.disk_usage(folder).free
    if free < order["size"]:
        folder.rmdir()
        return {"error": f"No space left on {folder.parent}: {free:,} bytes are free, the wheel has {order['size']:,}"}
    return {"installed": present, "folder": str(folder)}


def pip(order: Order, command: str, *arguments: str) -> str:
    """Run pip; empty if it went well, else what it said last."""
    argv = ["sudo", "-H", "-n"] if order["sudo"] else []
    argv += [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", command]
    if order["mirror"] and command == "install":
        argv += ["-i", order["mirror"]]
    done = subprocess.run(
        [*argv, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=_PATIENCE_S,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    telling = [line for line in lines if "No space" in line or "rror:" in line or "ERROR" in line]
    return f"pip {command}: {(telling or lines or [f'exit {done.returncode}'])[-1]}"


def install(order: Order) -> Facts:
    """Check the copy, install it over whatever was there, remove the copy."""
    wheel = Path(order["folder"], order["file"])
    try:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as exc:
        return {"error": f"the wheel did not arrive: {exc}"}
    if digest != order["sha256"]:
        size = wheel.stat().st_size
        return {
            "error": f"the copy of the wheel is incomplete: {size:,} of {order['size']:,} bytes, sha256 {digest[:12]}"
        }
    for other in installed(order["rivals"]):  # another distribution of the same import names
        if said := pip(order, "uninstall", "-y", other):
            return {"error": said}
    # pip takes the old files away itself, and puts them back if the new ones cannot be written. It leaves an
    # installation of the same version alone unless it is forced, and forced it would install torch anew, too.
    extras = f"[{order['extras']}]" if order["extras"] else ""
    said = pip(order, "install", "--no-deps", "--force-reinstall", str(wheel)) if installed(order["names"]) else ""
    said = said or pip(order, "install", f"{wheel}{extras}")
    if said:
        return {"error": said}
    shutil.rmtree(wheel.parent, ignore_errors=True)
    return {"installed": installed(order["names"])}


def report(order: Order) -> Facts:
    """``ds_report --json`` of what is installed, from a folder that holds no checkout."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_ops.report", "--json"],
        cwd=tempfile.gettempdir(),
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_PATIENCE_S,
        check=False,
    )
    try:
        return {"report": json.loads(done.stdout)}
    except ValueError:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return {"error": f"ds_report fails: {said[-1]}"}


def main(order: Order) -> None:
    """Carry out one order and answer."""
    facts: Facts = {}
    try:
        for step in order["steps"]:
            facts.update({"look": look, "install": install, "report": report}[step](order))
            if "error" in facts:
                break
    except Exception as exc:  # whatever is wrong with this host is a line of the table
        facts["error"] = f"{type(exc).__name__}: {exc}"
    answer(facts)


if __name__ == "__main__":
    main(json.loads(base64.b64decode(sys.argv[-1])))
