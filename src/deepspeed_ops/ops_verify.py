"""``ds_ops verify``: every op's numbers, each in a process of its own; what dies or is wrong is quarantined."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed_ops.op_builder.loader import Loader
from deepspeed_ops.op_builder.store import Part

CHILD = ("-m", "deepspeed_ops.numeric")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Verdict:
    """What became of one op.

    Attributes:
        op: its name.
        state: ``ok``, ``not checked`` (loaded, but its numbers could not be looked at), ``wrong numbers``, ``died``,
            ``too slow`` or ``failed`` (an error of ours).
        why: in words.
        part: the host library that was loaded.
        cases: the comparisons.
        quarantined: whether the part will not be offered again on this machine.
    """

    op: str
    state: str
    why: str = ""
    part: str = ""
    cases: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    quarantined: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing speaks against the op."""
        return self.state in ("ok", "not checked")

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


def verify(loader: Loader, op: str, timeout_s: float = TIMEOUT_S, child: Sequence[str] = CHILD) -> Verdict:
    """Load an op and check its numbers in a child process.

    Args:
        loader: whose environment and marks count.
        op: its name.
        timeout_s: after so long the child is ended.
        child: arguments of the interpreter, before the op's name.
    """
    env = {**loader.settings.env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [sys.executable, *child, op],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(op, "too slow", f"the child process was ended after {timeout_s:.0f} s")
    said = stages(done.stdout)
    verdict = judged(op, done.returncode, said, done.stderr)
    if verdict.state in ("died", "wrong numbers") and "loaded" in said:
        return _quarantine(loader, verdict, said["loaded"])
    return verdict


def stages(out: str) -> dict[str, dict[str, Any]]:
    """The lines of JSON that the child wrote, by stage; other output between them is nobody's business."""
    found = {}
    for line in out.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict) and "stage" in data:
            found[str(data["stage"])] = data
    return found


def judged(op: str, code: int, said: Mapping[str, Mapping[str, Any]], err: str) -> Verdict:
    """What a child's end means.

    Args:
        op: the op.
        code: exit status; negative for a signal.
        said: what it wrote.
        err: its standard error.
    """
    part = str(said.get("loaded", {}).get("part", ""))
    if "failed" in said:
        error = said["failed"]
        return Verdict(op, "failed", "; ".join(str(error[k]) for k in ("what", "why", "fix") if error[k]), part)
    if "checked" not in said:
        when = (
            "while its numbers were checked" if "loaded" in said else "while it was loaded" if said else "at its start"
        )
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
        return Verdict(op, "died", f"the child process {ended(code)} {when}" + (f": {last}" if last else ""), part)
    cases = tuple(said["checked"]["cases"])
    wrong = [c for c in cases if not c["good"]]
    if wrong:
        told = "; ".join(f"{c['what']}: off by {c['worst']:.2g}, allowed {c['bound']:.2g}" for c in wrong)
        return Verdict(op, "wrong numbers", told, part, cases)
    note = str(said["checked"]["note"])
    return Verdict(op, "ok" if cases else "not checked", note, part, cases)


def ended(code: int) -> str:
    """A process's end in words.

    >>> ended(-4)
    'was ended by SIGILL'
    """
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _quarantine(loader: Loader, verdict: Verdict, loaded: Mapping[str, Any]) -> Verdict:
    for store in loader.stores:
        for part in store.parts(verdict.op):
            if isinstance(part, Part) and part.manifest.sha256 == loaded["sha256"]:
                loader.quarantine(part, f"ds_ops verify: {verdict.state}: {verdict.why}")
                return Verdict(**{**asdict(verdict), "cases": verdict.cases, "quarantined": True})
    return verdict


def verify_all(loader: Loader, ops: Sequence[str], say: Callable[[Verdict], None]) -> list[Verdict]:
    """Check ops one after the other; ``say`` is told of each as it is done."""
    out = []
    for op in ops:
        out.append(verify(loader, op))
        say(out[-1])
    return out
