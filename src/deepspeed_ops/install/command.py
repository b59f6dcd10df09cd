"""``ds_install``, and ``install.sh`` over it: DeepSpeed's options, one wheel, one table."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from deepspeed_ops.install import source, table
from deepspeed_ops.install.hosts import DEFAULT_HOSTFILE, wanted
from deepspeed_ops.install.table import Row
from deepspeed_ops.install.transport import Here, Outcome, Ssh, answer_of, choose
from deepspeed_ops.op_builder.errors import OpsError, UsageError
from deepspeed_ops.op_builder.manifest import file_sha256

SCHEMA = 1
FAILED = 1
_STEPS = ("look", "copy", "install")


class Parser(argparse.ArgumentParser):
    """Ends with 1 on a wrong option, as DeepSpeed's install.sh does."""

    def error(self, message: str) -> NoReturn:
        """Print usage and end."""
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(prog="install.sh", description="Install on this machine, or on every host of a hostfile.")
    add = made.add_argument
    add("-l", "--local_only", action="store_true", help="this machine only, whatever hostfile there is")
    add("-s", "--pip_sudo", action="store_true", help="run pip through sudo")
    add("-r", "--allow_sudo", action="store_true", help="allow running as root")
    add("-n", "--no_clean", action="store_true", help="keep build, dist and *.egg-info of earlier builds")
    add("-m", "--pip_mirror", metavar="URL", default="", help="package index that pip asks")
    help_hosts = f"hosts, 'name slots=N' a line; default {DEFAULT_HOSTFILE}, then SLURM_JOB_NODELIST, then local"
    add("-H", "--hostfile", type=Path, metavar="FILE", help=help_hosts)
    add("-e", "--examples", action="store_true", help="also what the examples need (deepspeed_ops.demo)")
    add("-v", "--verbose", action="store_true", help="show the build, and every host's whole output on failure")
    more = made.add_argument_group("beyond DeepSpeed's")
    more.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel instead of building one")
    more.add_argument(
        "--python", metavar="PYTHON", help="Python of the hosts; default: this one if there, else python3"
    )
    more.add_argument("--ssh_args", default="", metavar="ARGS", help="options for ssh, as one word")
    more.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="seconds for one step (default 1800)")
    more.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return made


@dataclass
class Run:
    """One installation under way.

    Attributes:
        transport: how hosts are reached.
        order: what the agents are told, without the steps.
        wheel: the file.
        tick: told host and step as they are done.
        rows: what became of each host.
        raw: what a host printed last.
    """

    transport: Ssh | Here
    order: dict[str, Any]
    wheel: Path
    tick: Callable[[str, str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)

    def everywhere(self, hosts: Sequence[str]) -> list[Row]:
        """Install on all hosts at once; one row each, in the order given. A failing host stops none of the others."""
        looked = self._ask(hosts, ["look"], "look")
        targets = {}
        for host, said in looked.items():
            if "report" in said:
                self.rows[host] = Row(host, "already there", "", said["report"], self.order["sha256"])
                for step in _STEPS[1:]:
                    self.tick(host, step)
            else:
                targets[host] = str(said["folder"])
        copied = self.transport.copy(targets, self.wheel, lambda host: self.tick(host, "copy")) if targets else {}
        for host, outcome in copied.items():
            if outcome.code != 0:
                self._failed(host, f"copying the wheel: {outcome.reason}", outcome)
        by_folder: dict[str, list[str]] = {}
        for host in targets:
            if host not in self.rows:
                by_folder.setdefault(targets[host], []).append(host)
        for folder, some in by_folder.items():
            self.order["folder"] = folder
            for host, said in self._ask(some, ["install", "report"], "install").items():
                sha256 = next((f["sha256"] for f in said["installed"].values()), "") or self.order["sha256"]
                self.rows[host] = Row(host, "installed", "", said["report"], sha256)
        return [self.rows[host] for host in hosts]

    def _ask(self, hosts: Sequence[str], steps: list[str], name: str) -> dict[str, dict[str, Any]]:
        """The answers of the hosts that have one; the others get a row that says why not."""
        outcomes = self.transport.ask(hosts, {**self.order, "steps": steps}, lambda host: self.tick(host, name))
        good = {}
        for host, outcome in outcomes.items():
            said = answer_of(outcome.text)
            if said is None:
                self._failed(host, outcome.reason, outcome)
            elif "error" in said:
                fix = f" (fix: {said['fix']})" if said.get("fix") else ""
                self._failed(host, f"{said['error']}{fix}", outcome)
            else:
                good[host] = said
        return good

    def _failed(self, host: str, why: str, outcome: Outcome) -> None:
        self.rows[host] = Row(host, "failed", why)
        self.raw[host] = outcome.text


# --- progress -----------------------------------------------------------------------------------------------------


@contextmanager
def progress(hosts: Sequence[str], err: TextIO) -> Iterator[Callable[[str, str], None]]:
    """A bar on a terminal, else a line per host and step; told by ``tick(host, step)``."""
    total, seen = len(hosts) * len(_STEPS), set[tuple[str, str]]()
    bar: Any = None
    if err.isatty() and not os.environ.get("NO_COLOR"):
        try:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(file=err), transient=True)
        except ImportError:
            bar = None

    def tick(host: str, step: str) -> None:
        if (host, step) in seen:
            return
        seen.add((host, step))
        if bar is not None:
            bar.update(task, completed=len(seen), description=f"{step} {host}")
        else:
            err.write(f"[{len(seen)}/{total}] {host}: {step}\n")
            err.flush()

    if bar is None:
        yield tick
        return
    with bar:
        task = bar.add_task("", total=total)
        yield tick


# --- leading ------------------------------------------------------------------------------------------------------


def pythons(given: str | None) -> list[str]:
    """What a host is asked for in turn: a virtual environment of the same path (a shared folder), else its python3."""
    if given:
        return [given]
    own = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()
    return [*([sys.executable] if own else []), "python3", "python"]


def order_for(wheel: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What every agent is told."""
    name = wheel.name.split("-")[0].replace("_", "-")
    return {
        "file": wheel.name,
        "sha256": file_sha256(wheel),
        "size": wheel.stat().st_size,
        "names": [name],
        # deepspeed holds everything that deepspeed-ops does; the other way round DeepSpeed's engine may be meant.
        "rivals": ["deepspeed-ops"] if name == "deepspeed" else [],
        "sudo": options.pip_sudo,
        "mirror": options.pip_mirror,
        "extras": "demo" if options.examples else "",
    }


def install(options: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Carry out what the options ask for; the exit code."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and not options.allow_sudo:
        raise UsageError(
            "refusing to install as root", "files of root in a user's environment break it", "-r allows it"
        )
    hosts = wanted(options.hostfile, options.local_only, os.environ)
    if options.wheel is not None:
        if not options.wheel.is_file() or options.wheel.suffix != ".whl":
            raise UsageError(f"--wheel {options.wheel} is no wheel", "expected an existing file *.whl", "leave it out")
        wheel = options.wheel.absolute()
    else:
        pip = [*(["-v"] if options.verbose else []), *(["-i", options.pip_mirror] if options.pip_mirror else [])]
        root = source.find_checkout(Path.cwd())
        wheel = source.wheel_of(root, os.environ, pip, options.no_clean, lambda line: print(line, file=err, flush=True))
    transport = choose(not hosts, pythons(options.python), shlex.split(options.ssh_args), options.timeout)
    names = hosts or ["localhost"]
    err.write(f"{wheel.name} on {len(names)} host{'s' if len(names) > 1 else ''} by {transport.name}\n")
    with progress(names, err) as tick:
        run = Run(transport, order_for(wheel, options), wheel, tick)
        rows = run.everywhere(names)
    show(rows, run, options, out)
    return 0 if all(row.good for row in rows) else FAILED


def show(rows: Sequence[Row], run: Run, options: argparse.Namespace, out: TextIO) -> None:
    """The table, the differences and the failures; or all of it as JSON."""
    differ, failed = table.differences(rows), [row for row in rows if not row.good]
    if options.json:
        data = [{"host": r.host, "state": r.state, "why": r.why, "sha256": r.sha256, "report": r.report} for r in rows]
        facts = {"schema": SCHEMA, "wheel": run.wheel.name, "sha256": run.order["sha256"]}
        out.write(json.dumps({**facts, "hosts": data, "differences": differ}, indent=2) + "\n")
        return
    out.writelines(f"{line}\n" for line in table.lines(rows))
    out.writelines(f"! {line}\n" for line in differ)
    for row in failed:
        out.write(f"x {row.host}: {row.why}\n")
        if options.verbose:
            out.writelines(f"    {line}\n" for line in run.raw.get(row.host, "").splitlines())
    done = len(rows) - len(failed)
    again = "; run it again: only what is not done is done" if failed else ""
    out.write(f"{done} of {len(rows)} hosts are done{again}\n")


def main(arguments: Sequence[str], out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Install; the exit code: 0, 1 where a host failed, else that of the error's class.

    Args:
        arguments: command line without the program's name.
        out: where the table goes; standard output by default.
        err: where progress and errors go; standard error by default.
    """
    options = parser().parse_args(list(arguments))
    err = sys.stderr if err is None else err
    try:
        return install(options, sys.stdout if out is None else out, err)
    except OpsError as exc:
        err.write(f"error: {exc}\n")
        return exc.exit_code
    except KeyboardInterrupt:
        err.write("interrupted; run it again: only what is not done is done\n")
        return 130


def cli_main() -> None:
    """Entry point of ``ds_install``."""
    raise SystemExit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli_main()
