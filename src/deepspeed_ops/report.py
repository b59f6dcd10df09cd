"""``ds_report``, ``dsr`` and ``python -m deepspeed.env_report``: what is installed, what would be loaded, and why.

Headings and row names are DeepSpeed's, so that scripts that search its output keep working; the verdict stands above
them. Colour only in a terminal and without ``NO_COLOR``. The exit code is 0, unless ``--check`` finds an op that cannot
work. ``--json`` prints one object of the schema ``ds_report.schema.json``, which lies beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from deepspeed_ops.report_data import OpLine, Report, gather, shm_is_small

SCHEMA_FILE = Path(__file__).with_name("ds_report.schema.json")
RULE = "-" * 50
_NAME_WIDTH, _INSTALLED_WIDTH, _INFO_WIDTH = 23, 11, 33
_INSTALLED_HEADING = "installed"
_REASONS = 3  # of each half of an op; --why shows all


@dataclass(frozen=True)
class Span:
    """A piece of a line; ``style`` is "ok", "warn", "fail", "dim" or ""."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "dim": "dim", "": ""}


def plain(text: str) -> Line:
    """A line without colour."""
    return (Span(text),)


def row(name: str, value: Span | str, width: int = _INFO_WIDTH) -> Line:
    """``name ....... value``."""
    value = Span(value) if isinstance(value, str) else value
    return Span(f"{name} {'.' * max(1, width - len(name))} "), value


def operator_lines(report: Report, quiet: bool) -> Iterator[Line]:
    """The table of ops.

    Args:
        report: the facts.
        quiet: leave out why an op is not loaded otherwise, and the warnings.
    """
    yield from map(plain, (RULE, "DeepSpeed C++/CUDA extension op report", RULE))
    yield plain("NOTE: an op that is not installed is compiled at its first use (JIT),")
    yield plain("      if it is compatible. GPU code needs no compiler beside NVRTC.")
    yield plain(RULE)
    yield plain("JIT compiled ops requires ninja")
    yield row("ninja", Span("[OKAY]", "ok") if report.tools["ninja"] else Span("[FAIL]", "fail"), _NAME_WIDTH)
    yield plain(RULE)
    yield plain(f"op name {'.' * (_NAME_WIDTH - len('op name'))} {_INSTALLED_HEADING} .. compatible")
    yield plain(RULE)
    if not quiet:
        yield from ((Span(f" [WARNING]  {problem}", "warn"),) for problem in report.problems)
    for line in report.ops:
        yield from op_lines(line, quiet)
    if report.skipped and not quiet:
        yield plain("left out when this installation was built:")
        yield from ((Span(f"  {op}: {why}", "warn"),) for op, why in report.skipped.items())


def op_lines(line: OpLine, quiet: bool, everything: bool = False) -> Iterator[Line]:
    """One op: the row, then how each half of it would be loaded and why not otherwise (``everything``: all reasons)."""
    installed = Span("[YES]", "ok") if line.installed else Span("[NO]", "warn")
    compatible = Span("[OKAY]", "ok") if line.compatible else Span("[NO]", "fail")
    dots = "." * (_INSTALLED_WIDTH - len(installed.text))
    yield (Span(f"{line.op} {'.' * (_NAME_WIDTH - len(line.op))} "), installed, Span(f" {dots} "), compatible)
    if quiet:
        return
    for way in line.ways:
        yield (Span(f"    {way.what}: "), Span(way.how, "fail" if way.action == "fail" else ""))
        shown = way.why_not if everything else way.why_not[:_REASONS]
        yield from ((Span(f"        not {reason}", "dim"),) for reason in shown)
        if len(shown) < len(way.why_not):
            yield (Span(f"        and {len(way.why_not) - len(shown)} more: ds_report --why {line.op}", "dim"),)
        if way.fix:
            yield (Span(f"        fix: {way.fix}", "warn"),)
    if line.note:
        yield (Span(f"    {line.note}", "dim"),)


def info_lines(report: Report, quiet: bool) -> Iterator[Line]:
    """The rows about torch, compilers, driver and this installation."""
    torch, tools, host = report.torch, report.tools, report.host
    broken = Span(f" [FAIL] torch {torch.problem} ", "fail")
    yield from map(plain, (RULE, "DeepSpeed general environment info:"))
    yield row("torch install path", str(list(torch.path)) if torch.version else broken)
    yield row("torch version", torch.version or broken)
    yield row("deepspeed install path", str(list(report.path)))
    yield row("deepspeed info", f"{report.version}, {report.git_hash}, {report.git_branch}")
    yield row("torch cuda version", str(torch.cuda) if torch.version else broken)
    yield row("torch hip version", str(torch.hip) if torch.version else broken)
    nvcc = tools["nvcc"]
    yield row("nvcc version", nvcc[0]["version"] if nvcc else Span("none found; NVRTC compiles GPU code too", "dim"))
    yield row("deepspeed wheel compiled w.", report.compiled_with)
    yield row("shared memory (/dev/shm) size", shm(report.shm_bytes))
    if shm_is_small(report.shm_bytes) and not quiet:
        yield (Span(" [WARNING]  /dev/shm is small: give the container more, e.g. docker run --shm-size=8g", "warn"),)
    yield row("python", report.python)
    yield row("platform", f"{host['platform']} {host['libc']}".strip())
    yield row("cpu features", " ".join(host["cpu_features"]) or "none that the ops use")
    cxx = tools["host"]
    found = f"{cxx['kind']} {cxx['version']} ({cxx['path']})" if cxx else Span("none found", "warn")
    yield row("c++ compiler", found)
    for nvrtc in tools["nvrtc"]:
        yield row("nvrtc", f"{nvrtc['version']} ({nvrtc['source']}: {nvrtc['path']})")
    if not tools["nvrtc"]:
        yield row("nvrtc", Span("none found", "dim" if not host["gpus"] else "warn"))
    ffi = tools["ffi"]
    yield row("apache-tvm-ffi", ffi["version"] if ffi else Span("[FAIL] not found: pip install apache-tvm-ffi", "fail"))
    yield from gpu_lines(report, quiet)


def gpu_lines(report: Report, quiet: bool) -> Iterator[Line]:
    """Driver and GPUs."""
    host = report.host
    driver = host["driver"]
    text = f"{driver['version']} (CUDA {driver['cuda']})" if driver else Span("none found", "dim")
    yield row("gpu driver", text)
    for gpu in host["gpus"]:
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        yield row(f"gpu {gpu['ordinal']}", f"{gpu['name']}, compute capability {gpu['capability']}, {size}")
    if not quiet:
        yield from ((Span(f"    {note}", "dim"),) for note in host["notes"])


def store_lines(report: Report) -> Iterator[Line]:
    """What lies in which store."""
    yield from map(plain, (RULE, "stores of built parts, in the order they are searched:"))
    for store in report.stores:
        if not store.exists:
            yield (Span(f"  {store.origin}: {store.root}: not there", "dim"),)
            continue
        where = store.filesystem or "?"
        if store.network:
            where += ", shared with other machines"
        leavings = "".join(f", {size:,} bytes of {name}" for name, size in store.leavings.items())
        text = f"  {store.origin}: {store.root}: {store.parts} parts, {store.bytes:,} bytes{leavings} ({where})"
        yield plain(text)
        if store.unreadable:
            yield (Span(f"    {store.unreadable} parts cannot be read: ds_ops list; ds_ops gc", "warn"),)


_STATE_STYLES = {"found": "ok", "missing": "warn", "": "dim"}


def feature_lines(report: Report) -> Iterator[Line]:
    """System packages per feature, and the extras."""
    yield from map(plain, (RULE, "system packages per feature:"))
    for line in report.features:
        state = Span(line.state or "not looked for", _STATE_STYLES[line.state])
        yield Span(f"  {line.feature}: {line.need} ({line.package or 'no package known here'}): "), state
    if report.extras:
        yield from map(plain, (RULE, "extras, pip install deepspeed[NAME]:"))
    for extra in report.extras:
        what = ", ".join(extra.requirements) or "nothing"
        lacking = f"missing: {', '.join(extra.missing)}" if extra.missing else "installed"
        yield Span(f"  {extra.name}: {what}: "), Span(lacking, "dim" if extra.missing else "ok")


_VERDICT_STYLES = {"ready": "ok", "partly": "warn", "broken": "fail"}


def verdict_line(report: Report) -> Line:
    """The report in one line."""
    found = report.verdict
    return (Span(found.text, _VERDICT_STYLES[found.state]),)


def fix_lines(report: Report) -> Iterator[Line]:
    """``--fix``: every problem with the commands against it."""
    yield verdict_line(report)
    if not report.fixes:
        yield plain("nothing to fix: whatever does not work here lacks hardware, not software")
    for advice in report.fixes:
        yield (Span(f"# {advice.problem}: {advice.why.splitlines()[0] if advice.why else ''}", "warn"),)
        yield from map(plain, advice.commands or ("# no command changes that",))


def why_lines(report: Report, op: str) -> Iterator[Line]:
    """``--why OP``: everything that was looked at for one op.

    Raises:
        UsageError: no op has this name.
    """
    from deepspeed_ops.op_builder.spec import get_spec

    get_spec(op)
    for line in report.ops:
        if line.op == op:
            yield from op_lines(line, quiet=False, everything=True)
    yield from ((Span(f"    {f.need}: {f.state or 'not looked for'}"),) for f in report.features if f.feature == op)
    yield from ((Span(f" [WARNING]  {problem}", "warn"),) for problem in report.problems)


def shm(size: int | None) -> Span | str:
    """Size of /dev/shm in words."""
    if size is None:
        return Span("no /dev/shm on this system", "dim")
    return Span(f"{size / 2**30:.2f} GB", "warn" if shm_is_small(size) else "")


def lines(report: Report, hide_operators: bool = False, quiet: bool = False) -> list[Line]:
    """The whole report.

    Args:
        report: the facts.
        hide_operators: ``--hide_operator_status``.
        quiet: ``--hide_errors_and_warnings``.
    """
    ops = [] if hide_operators else list(operator_lines(report, quiet))
    more = [] if quiet else [*store_lines(report), *feature_lines(report)]
    return [verdict_line(report), *ops, *info_lines(report, quiet), *more]


def write(report_lines: Sequence[Line], out: TextIO, colour: bool) -> None:
    """Print, coloured with rich or plain."""
    if not colour:
        out.writelines("".join(span.text for span in line).rstrip() + "\n" for line in report_lines)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, highlight=False, soft_wrap=True)
    for line in report_lines:
        console.print(Text.assemble(*((span.text, _STYLES[span.style]) for span in line)))


def wants_colour(out: TextIO) -> bool:
    """Whether ``out`` is a terminal and nobody said otherwise."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(out, "isatty", lambda: False)())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="ds_report", description="What the compiled ops would do on this machine.")
    made.add_argument("--hide_operator_status", action="store_true", help="leave out the table of ops")
    made.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out warnings and reasons")
    made.add_argument("--json", action="store_true", help="print one JSON object (ds_report.schema.json) instead")
    made.add_argument("--schema", action="store_true", help="print the JSON schema of --json")
    made.add_argument("--why", metavar="OP", help="only this op, with every candidate and the reason against it")
    made.add_argument("--fix", action="store_true", help="only what to do: the commands for this machine")
    made.add_argument(
        "--check",
        nargs="*",
        metavar="OP",
        help="exit non-zero if one of these ops cannot work here; without names: any op, missing GPUs aside",
    )
    return made


def main(
    arguments: Sequence[str] | None = None,
    hide_operator_status: bool = False,
    hide_errors_and_warnings: bool = False,
    out: TextIO | None = None,
) -> int:
    """Print the report.

    Args:
        arguments: command line without the program's name; None: no options.
        hide_operator_status: leave out the table of ops.
        hide_errors_and_warnings: leave out warnings and reasons.
        out: where to; standard output by default.

    Returns:
        The exit code.
    """
    options = parser().parse_args(list(arguments or ()))
    out = sys.stdout if out is None else out
    if options.schema:
        out.write(SCHEMA_FILE.read_text(encoding="utf-8"))
        return 0
    report = gather()
    if options.json:
        out.write(json.dumps(report.as_dict(), indent=2) + "\n")
    elif options.why or options.fix:
        from deepspeed_ops.op_builder.errors import UsageError

        try:
            some = [
                *(why_lines(report, options.why) if options.why else ()),
                *(fix_lines(report) if options.fix else ()),
            ]
        except UsageError as exc:
            sys.stderr.write(f"error: {exc}\n")
            return exc.exit_code
        write(some, out, wants_colour(out))
    else:
        quiet = options.hide_errors_and_warnings or hide_errors_and_warnings
        write(lines(report, options.hide_operator_status or hide_operator_status, quiet), out, wants_colour(out))
    return 0 if options.check is None else check(report, options.check)


def check(report: Report, names: Sequence[str]) -> int:
    """Name on standard error what cannot work; the exit code of the cause, 0 if all is well."""
    from deepspeed_ops.op_builder.errors import NoMatchingPart

    failures = report.failures(names)
    for name, why in failures.items():
        sys.stderr.write(f"{name} cannot work here\n  why: {why}\n")
    return NoMatchingPart.exit_code if failures else 0


def cli_main() -> None:
    """Entry point of ``ds_report`` and ``dsr``."""
    raise SystemExit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli_main()
