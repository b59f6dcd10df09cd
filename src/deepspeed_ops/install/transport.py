"""Ask the agent on many hosts and copy a file to them: through pdsh and pdcp, through ssh, or right here."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_ops.install import agent

# A host that stops answering is given up after 15 s; nobody is asked for a password.
SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")  # what pdcp's remote shell leaves alone
_STATUS = "ds_install_status="

Done = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a host answered: exit status (255: it could not be reached), and everything it printed."""

    code: int
    text: str

    @property
    def reason(self) -> str:
        """The telling line of a failure."""
        lines = [
            line.strip() for line in self.text.splitlines() if line.strip() and "Warning: Permanently added" not in line
        ]
        telling = [
            ln
            for ln in lines
            if re.search(r"No space|denied|refused|timed out|resolve|route|closed|reset|lost|not found", ln)
        ]
        said = (telling or lines or ["it said nothing"])[-1]
        return said if self.code != 255 else f"cannot be reached, or was lost: {said}"


def agent_argv(order: Mapping[str, Any]) -> list[str]:
    """Arguments of a Python that make it the agent and give it an order.

    A Python that is too old gets as far as saying so: what stands before the agent's own text runs on any of them.
    """
    packed = base64.b64encode(zlib.compress(Path(agent.__file__).read_bytes(), 9)).decode("ascii")
    too_old = "print('too old: Python ' + sys.version.split()[0] + ' at ' + sys.executable + '; --python PYTHON')"
    run = f"exec(zlib.decompress(base64.b64decode('{packed}')))"
    boot = f"import base64,sys,zlib\nif sys.version_info < (3, 10): {too_old}; sys.exit(1)\n{run}"
    return ["-c", boot, base64.b64encode(json.dumps(order).encode("utf-8")).decode("ascii")]


def answer_of(text: str) -> dict[str, Any] | None:
    """What the agent answered among everything a host printed; None where it did not get so far."""
    pieces = [line.removeprefix(agent.MARK) for line in text.splitlines() if line.startswith(agent.MARK)]
    try:
        found = json.loads(base64.b64decode("".join(pieces), validate=True)) if pieces else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Ssh:
    """ssh alone, one process per host.

    Args:
        pythons: what a host is asked for in turn, by path or name.
        ssh_args: options of ssh beside our own.
        limit: processes at a time.
        timeout_s: seconds after which a host is given up.
    """

    name = "ssh"

    def __init__(
        self, pythons: Sequence[str], ssh_args: Sequence[str] = (), limit: int = 64, timeout_s: float = 1800.0
    ) -> None:
        self.pythons, self.options = pythons, (*SSH_OPTIONS, *ssh_args)
        self.limit, self.timeout_s = limit, timeout_s

    def ask(self, hosts: Sequence[str], order: Mapping[str, Any], done: Done) -> dict[str, Outcome]:
        """Give the agent on every host an order; ``done`` is told of each host that ended."""
        names = " ".join(map(shlex.quote, self.pythons))
        find = f'for p in {names}; do if command -v "$p" >/dev/null 2>&1; then break; fi; done'
        argv = " ".join(map(shlex.quote, agent_argv(order)))
        # A login shell may be csh: what we say is for sh.
        script = f'{find}; exec "$p" {argv}'
        return self.run(hosts, f"exec sh -c {shlex.quote(script)}", done)

    def run(self, hosts: Sequence[str], command: str, done: Done) -> dict[str, Outcome]:
        """Run a shell command on every host at once; ``done`` is told of each host that ended."""
        return self._each(hosts, lambda host: ["ssh", *self.options, "--", host, command], done)

    def copy(self, targets: Mapping[str, str], file: Path, done: Done) -> dict[str, Outcome]:
        """Copy a file into a folder of every host; the folders may differ."""

        # Without scp's own quoting rules, which changed with OpenSSH 9: the remote shell gets one quoted word.
        def argv(host: str) -> list[str]:
            return ["ssh", *self.options, "--", host, f"cat > {shlex.quote(f'{targets[host]}/{file.name}')}"]

        return self._each(list(targets), argv, done, file)

    def _each(
        self, hosts: Sequence[str], argv: Callable[[str], list[str]], done: Done, stdin: Path | None = None
    ) -> dict[str, Outcome]:
        def one(host: str) -> tuple[str, Outcome]:
            outcome = call(argv(host), self.timeout_s, stdin)
            done(host)
            return host, outcome

        if not hosts:
            return {}
        with ThreadPoolExecutor(max_workers=min(self.limit, len(hosts))) as pool:
            return dict(pool.map(one, hosts))


class Pdsh(Ssh):
    """pdsh and pdcp, one process for all hosts; ssh for copying to those that pdcp cannot serve."""

    name = "pdsh and pdcp"

    def run(self, hosts: Sequence[str], command: str, done: Done) -> dict[str, Outcome]:
        """See :meth:`Ssh.run`."""
        # pdsh replaces %h, %u and %n in the command; its exit status is the largest of all, so each host tells its own.
        asked = f"({command}) 2>&1; echo {_STATUS}$?".replace("%", "%%")
        return self._all("pdsh", hosts, [asked], done)

    def copy(self, targets: Mapping[str, str], file: Path, done: Done) -> dict[str, Outcome]:
        """See :meth:`Ssh.copy`."""
        out: dict[str, Outcome] = {}
        by_folder: dict[str, list[str]] = {}
        for host, folder in targets.items():
            by_folder.setdefault(folder, []).append(host)
        rest: dict[str, str] = {}
        for folder, hosts in by_folder.items():
            if not _PLAIN.fullmatch(folder) or shutil.which("pdcp") is None:
                rest.update(dict.fromkeys(hosts, folder))
                continue
            found = self._all("pdcp", hosts, [str(file), folder], lambda host: None)
            # pdcp must be installed on the other side, too.
            rest.update({h: folder for h in hosts if found[h].code in (126, 127) or "not found" in found[h].text})
            out.update({h: found[h] for h in hosts if h not in rest})
        for host in out:
            done(host)
        return {**out, **super().copy(rest, file, done)}

    def _all(self, program: str, hosts: Sequence[str], arguments: Sequence[str], done: Done) -> dict[str, Outcome]:
        argv = [program, "-R", "ssh", "-f", str(max(1, len(hosts))), "-w", ",".join(hosts), *arguments]
        env = {**os.environ, "PDSH_SSH_ARGS_APPEND": " ".join(self.options), "LC_ALL": "C.UTF-8"}
        said: dict[str, list[str]] = {host: [] for host in hosts}
        codes: dict[str, int] = {}
        names = {host.rpartition("@")[2]: host for host in hosts}

        def read(line: str) -> None:
            host, text = attribute(line, names)
            if host is None:
                return
            if text.startswith(_STATUS):
                codes[host] = int(text.removeprefix(_STATUS) or 1)
                done(host)
            else:
                said[host].append(text)
                lost = re.search(r"(?:ssh )?exited with exit code (\d+)", text)
                if lost and line.startswith(("pdsh@", "pdcp@")):
                    codes[host] = int(lost[1])
                    done(host)

        code, rest = stream(argv, env, self.timeout_s, read)
        # pdsh tells every host's status, and one without was lost. pdcp tells of failures only, host by host; if it
        # failed as a whole it says so once.
        silent = 255 if program == "pdsh" or code < 0 else code
        if program == "pdcp" and codes:
            silent = 0
        out = {}
        for host in hosts:
            status = codes.get(host, 1 if program == "pdcp" and said[host] else silent)
            out[host] = Outcome(status, "\n".join(said[host]) or (rest if status else ""))
        return out


def attribute(line: str, names: Mapping[str, str]) -> tuple[str | None, str]:
    """The host that a line of pdsh's output belongs to, and its text.

    >>> attribute("node1: hello", {"node1": "me@node1"})
    ('me@node1', 'hello')
    >>> attribute("pdsh@here: node1: ssh exited with exit code 255", {"node1": "node1"})
    ('node1', 'ssh exited with exit code 255')
    """
    text = re.sub(r"^pd(?:sh|cp)@[^:]*: ", "", line)
    name, colon, rest = text.partition(": ")
    if not colon and text.endswith(":"):
        name, rest = text[:-1], ""
    return names.get(name), rest


class Here:
    """This machine: no network, no copy."""

    name = "this machine"

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self.timeout_s = timeout_s

    def ask(self, hosts: Sequence[str], order: Mapping[str, Any], done: Done) -> dict[str, Outcome]:
        """See :meth:`Ssh.ask`."""
        # install.sh puts the checkout on PYTHONPATH, where its own egg-info looks like an installation.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        outcome = call([sys.executable, *agent_argv(order)], self.timeout_s, env=env)
        for host in hosts:
            done(host)
        return dict.fromkeys(hosts, outcome)

    def copy(self, targets: Mapping[str, str], file: Path, done: Done) -> dict[str, Outcome]:
        """See :meth:`Ssh.copy`."""
        out = {}
        for host, folder in targets.items():
            try:
                shutil.copyfile(file, Path(folder, file.name))
                out[host] = Outcome(0, "")
            except OSError as exc:
                out[host] = Outcome(1, str(exc))
            done(host)
        return out


def choose(local: bool, pythons: Sequence[str], ssh_args: Sequence[str], timeout_s: float) -> Ssh | Here:
    """How to reach the hosts: pdsh where it is installed, else ssh; ``local``: this machine alone."""
    if local:
        return Here(timeout_s)
    blanks = any(" " in word for word in ssh_args)  # pdsh splits its options at blanks
    return (Pdsh if shutil.which("pdsh") and not blanks else Ssh)(pythons, ssh_args, timeout_s=timeout_s)


def call(
    argv: Sequence[str], timeout_s: float, stdin: Path | None = None, env: Mapping[str, str] | None = None
) -> Outcome:
    """Run one command to its end; what it prints, both streams."""
    source = subprocess.DEVNULL if stdin is None else stdin.open("rb")
    try:
        done = subprocess.run(
            list(argv),
            env=None if env is None else dict(env),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(255, f"no answer within {timeout_s:.0f} s: timed out")
    except OSError as exc:
        return Outcome(127, f"{argv[0]} did not start: {exc}")
    finally:
        if not isinstance(source, int):
            source.close()
    return Outcome(done.returncode, done.stdout)


def stream(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float, read: Callable[[str], None]
) -> tuple[int, str]:
    """Run a command and hand over its lines as they come. Exit status (negative: ended by us) and the last lines."""
    try:
        running = subprocess.Popen(
            list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except OSError as exc:
        return 127, f"{argv[0]} did not start: {exc}"
    timer = threading.Timer(timeout_s, running.kill)
    timer.start()
    last: list[str] = []
    try:
        lines: Iterable[str] = running.stdout or ()
        for line in lines:
            last = [*last[-4:], line.rstrip("\n")]
            read(line.rstrip("\n"))
        return running.wait(), "\n".join(last)
    finally:
        timer.cancel()
        if running.poll() is None:
            running.kill()
            running.wait()
