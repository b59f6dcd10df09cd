"""Lists of hosts: MPI-style hostfiles and Slurm's node lists. Pure but for reading the file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from deepspeed_ops.op_builder.errors import UsageError

DEFAULT_HOSTFILE = Path("/job/hostfile")
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WIDEST = 100_000  # hosts of one range: more is a slip of the keyboard


def wanted(given: Path | None, local_only: bool, env: Mapping[str, str], default: Path = DEFAULT_HOSTFILE) -> list[str]:
    """The hosts to install on; empty: this machine.

    Args:
        given: ``--hostfile``.
        local_only: ``--local_only``.
        env: where ``SLURM_JOB_NODELIST`` is looked up.
        default: taken if it exists and nothing else is said.

    Raises:
        UsageError: the file is absent, or not a hostfile; the node list cannot be read.
    """
    if local_only:
        return []
    if given is not None:
        return read_hostfile(given)
    if default.is_file():
        return read_hostfile(default)
    nodes = env.get("SLURM_JOB_NODELIST", "").strip()
    return expand_nodelist(nodes) if nodes else []


def read_hostfile(path: Path) -> list[str]:
    """The hosts of a file of lines ``name slots=N``; ``#`` begins a comment, blank lines count for nothing.

    Raises:
        UsageError: it cannot be read, a line is none of these, a host stands there twice, or there is none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"hostfile {path} cannot be read", str(exc), "--hostfile FILE, or -l for this machine only"
        ) from exc
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, where: str = "hostfile") -> list[str]:
    """See :func:`read_hostfile`.

    >>> parse_hostfile("# two nodes\\nnode1 slots=8\\n\\nuser@node2 slots=4  # old\\n")
    ['node1', 'user@node2']
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        problem = _problem(words, hosts)
        if problem:
            raise UsageError(f"{where}, line {number}: {line.strip()!r}", problem, "name slots=N, one host a line")
        hosts[words[0]] = number
    if not hosts:
        raise UsageError(f"{where} names no host", "every line is blank or a comment", "name slots=N, one host a line")
    return list(hosts)


def _problem(words: list[str], seen: Mapping[str, int]) -> str:
    name, rest = words[0], words[1:]
    if not _HOST.fullmatch(name):
        return f"{name!r} is no name of a host"
    if name in seen:
        return f"{name} stands in line {seen[name]} already"
    for word in rest:
        key, equals, value = word.partition("=")
        # MPI knows more keys than slots; none of them matters here.
        if (
            not equals
            or not key
            or (key in ("slots", "max_slots", "max-slots") and not (value.isascii() and value.isdigit()))
        ):
            return f"{word!r} is not slots=N"
    return ""


def expand_nodelist(text: str) -> list[str]:
    """Slurm's short form of many hosts.

    >>> expand_nodelist("gpu-[08-10,12],login,r[1-2]n[1-2]")
    ['gpu-08', 'gpu-09', 'gpu-10', 'gpu-12', 'login', 'r1n1', 'r1n2', 'r2n1', 'r2n2']

    Raises:
        UsageError: it is not of that form.
    """
    fix = "scontrol show hostnames, one a line, as --hostfile"
    if text.count("[") != text.count("]") or re.search(r"\[[^\]]*\[", text):
        raise UsageError(f"SLURM_JOB_NODELIST={text!r}", "its brackets do not match", fix)
    hosts: dict[str, None] = {}
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", item.strip())
        for parts in itertools.product(*(_range(ranges, text, fix) if ranges else [plain] for ranges, plain in pieces)):
            name = "".join(parts)
            if not _HOST.fullmatch(name):
                raise UsageError(f"SLURM_JOB_NODELIST={text!r}", f"{name!r} is no name of a host", fix)
            hosts[name] = None
    return list(hosts)


def _range(ranges: str, text: str, fix: str) -> list[str]:
    out = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if match is None or (match[2] and not 0 <= int(match[2]) - int(match[1]) < _WIDEST):
            raise UsageError(f"SLURM_JOB_NODELIST={text!r}", f"{piece!r} is no range", fix)
        width, last = len(match[1]), int(match[2] or match[1])
        out += [str(n).zfill(width) for n in range(int(match[1]), last + 1)]
    return out
