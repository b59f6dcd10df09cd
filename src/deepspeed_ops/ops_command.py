"""``ds_ops``: look into the stores of built parts, fill them, carry them elsewhere, check and clean them.

Every subcommand takes ``--json`` and then prints one JSON object, errors included. Exit codes are those of the error
classes (``docs/errors.md``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from deepspeed_ops.op_builder import HOME
from deepspeed_ops.op_builder.errors import LoadFailed, OpsError, StoreError, UsageError
from deepspeed_ops.op_builder.host import HostFacts, detect
from deepspeed_ops.op_builder.loader import Loader
from deepspeed_ops.op_builder.resolve import Accepted, Resolution
from deepspeed_ops.op_builder.settings import Settings
from deepspeed_ops.op_builder.spec import OpSpec, all_specs, get_spec
from deepspeed_ops.op_builder.store import Part, Store, jit_store

SCHEMA = 1


class Session:
    """One call of the command: the environment, the machine, and where lines go."""

    def __init__(self, settings: Settings, out: TextIO, as_json: bool) -> None:
        self.settings, self.out, self.as_json = settings, out, as_json
        self.host: HostFacts = detect(settings.env)
        self.loader = Loader(settings, home=HOME, host=self.host)

    def say(self, line: str = "") -> None:
        """A line for people; nothing under ``--json``."""
        if not self.as_json:
            self.out.write(line.rstrip() + "\n")
            self.out.flush()

    def give(self, data: Mapping[str, Any]) -> None:
        """The one object of ``--json``."""
        if self.as_json:
            self.out.write(json.dumps({"schema": SCHEMA, **data}, indent=2) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns; the last one is as long as it is."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def chosen(names: Sequence[str]) -> list[OpSpec]:
    """The specs of the names; all of them where none is given.

    Raises:
        UsageError: a name that no op has.
    """
    return [get_spec(name) for name in names] if names else list(all_specs().values())


# --- subcommands --------------------------------------------------------------------------------------------------


def list_parts(session: Session, options: argparse.Namespace) -> int:
    """Every part of every store, and its state here."""
    from deepspeed_ops.op_builder.inventory import inventory

    entries = inventory(session.loader, chosen(options.ops), session.host.devices)
    rows = [[e.op, e.variant, e.origin, e.state, f"{e.size:,}", e.compiler, e.sha256[:12], e.path] for e in entries]
    if rows:
        for line in table(["op", "variant", "store", "state", "bytes", "by", "sha256", "file"], rows):
            session.say(line)
        for entry in entries:
            if entry.state != "ok":
                session.say(f"{entry.op} {entry.variant} ({entry.origin}): {entry.state}: {entry.why}")
    else:
        session.say("no part lies in any store; an op is compiled at its first use, or by: ds_ops build")
    session.give({"parts": [e.as_dict() for e in entries], "stores": [str(s.root) for s in session.loader.stores]})
    return 0


def which(session: Session, options: argparse.Namespace) -> int:
    """What would be loaded for an op, and every other candidate with the reason against it."""
    found: list[Resolution] = []
    for spec in chosen(options.ops):
        if spec.python_only:
            session.say(f"op {spec.name}: Python only, nothing is loaded")
            continue
        found.append(session.loader.resolution(spec.name))
        found.extend(session.loader.resolution(spec.name, d) for d in session.host.devices if spec.device)
        if spec.device and not session.host.devices:
            session.say(f"op {spec.name}: runs on a GPU and none is visible: {'; '.join(session.host.notes)}")
    for resolution in found:
        session.say(resolution.explain())
        if resolution.choice is None and (fix := resolution.error().fix):
            session.say(f"  fix: {fix}")
    session.give({"resolutions": [as_dict(r) for r in found]})
    return 0 if all(r.choice is not None for r in found) else found[0].error().exit_code


def as_dict(resolution: Resolution) -> dict[str, Any]:
    """A resolution as plain values."""
    trace = [
        {"candidate": v.name, "accepted": True, "chosen": v is resolution.choice, "why": v.why, "axis": "", "fix": ""}
        if isinstance(v, Accepted)
        else {"candidate": v.name, "accepted": False, "chosen": False, "why": v.why, "axis": v.axis, "fix": v.fix}
        for v in resolution.trace
    ]
    return {"op": resolution.op, "subject": resolution.subject, "action": resolution.action, "trace": trace}


def build(session: Session, options: argparse.Namespace) -> int:
    """Build ops into the JIT store, ahead of their first use."""
    from deepspeed_ops.op_builder.aot import targets_for
    from deepspeed_ops.op_builder.compile import build as build_plan
    from deepspeed_ops.op_builder.plan import plan
    from deepspeed_ops.op_builder.targets import Target
    from deepspeed_ops.op_builder.toolchain import discover

    settings, host = session.settings, session.host
    tools, store = discover(settings, host), jit_store(settings)
    parts: list[Part] = []
    here = sorted({Target(*device.capability) for device in host.devices})
    for spec in chosen(options.ops):
        if spec.python_only:
            continue
        # Ahead of a GPU that is not here nothing is guessed: it has to be named.
        targets: Sequence[Target] = ()
        if spec.device:
            targets = tuple(targets_for(spec, settings, options.archs)) if options.archs else here
            if not targets:
                session.say(f"{spec.name}: no GPU is visible; --archs names what to build GPU code for")
        made = plan(spec, tools, tuple(targets), settings, host, home=session.loader.home)
        parts.extend(build_plan(made, store, settings, session.say, tools.ninja))
    for part in parts:
        session.say(f"ready: {part.manifest.op} {part.manifest.variant}: {part.path}")
    session.give({"store": str(store.root), "parts": [facts(part) for part in parts]})
    return 0


def facts(part: Part) -> dict[str, Any]:
    """A part as plain values."""
    found = part.manifest
    named = {"op": found.op, "variant": found.variant, "kind": found.kind, "path": str(part.path)}
    return {**named, "size": found.size, "sha256": found.sha256, "key": found.key}


def verify(session: Session, options: argparse.Namespace) -> int:
    """Check the ops' numbers, each in a child process."""
    from deepspeed_ops.ops_verify import Verdict, verify_all

    def say(verdict: Verdict) -> None:
        session.say(f"{verdict.op}: {verdict.state}" + (f": {verdict.why}" if verdict.why else ""))
        for case in verdict.cases if options.verbose else ():
            session.say(f"    {case['what']}: off by {case['worst']:.2g}, allowed {case['bound']:.2g}")
        if verdict.quarantined:
            session.say(f"    quarantined on this machine: {verdict.part} (ds_ops gc --verdicts lifts that)")

    found = verify_all(session.loader, [spec.name for spec in chosen(options.ops)], say)
    session.give({"ops": [v.as_dict() for v in found]})
    return 0 if all(v.good for v in found) else LoadFailed.exit_code


def export(session: Session, options: argparse.Namespace) -> int:
    """Write the parts that would be loaded here into one file."""
    from deepspeed_ops import version
    from deepspeed_ops.op_builder.archive import export_parts
    from deepspeed_ops.op_builder.inventory import Entry, inventory

    specs = chosen(options.ops)
    entries = inventory(session.loader, specs, session.host.devices)
    usable: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        # Of several stores the first counts, as in the search; GPU parts go along whichever GPU is here.
        fits = entry.state == "ok" or (entry.state == "unfit" and entry.kind == "device")
        if fits and (not options.variant or entry.variant in options.variant):
            usable.setdefault((entry.op, entry.variant), entry)
    wanted = {entry.path for entry in usable.values()}
    parts = [p for s in session.loader.stores for spec in specs for p in s.parts(spec.name) if str(p.path) in wanted]
    missing = [n for n in options.ops if not any(isinstance(p, Part) and p.manifest.op == n for p in parts)]
    if missing:
        why = "nothing of it lies ready in a store"
        raise UsageError(f"op {missing[0]} cannot be exported", why, f"ds_ops build {missing[0]}")
    whole = [p for p in parts if isinstance(p, Part)]
    export_parts(whole, options.output, version.current().version)
    for part in whole:
        session.say(f"{part.manifest.op} {part.manifest.variant}: sha256 {part.manifest.sha256}")
    session.say(f"wrote {options.output}: {len(whole)} parts, {options.output.stat().st_size:,} bytes")
    session.give({"file": str(options.output), "parts": [facts(part) for part in whole]})
    return 0


def import_(session: Session, options: argparse.Namespace) -> int:
    """Take over the parts of a file into the JIT store: all of them, or none."""
    from deepspeed_ops.op_builder.archive import import_parts, read_archive, refusal
    from deepspeed_ops.op_builder.inventory import judge

    packed = read_archive(options.file, get_spec)
    store = Store(options.into.absolute()) if options.into else jit_store(session.settings)

    def refuse(part: Part) -> OpsError | None:
        verdict = judge(session.loader, part, store.root)
        # A folder shared by unlike machines may be filled from one of them.
        foreign = verdict is not None and verdict.axis in ("platform", "glibc", "musl")
        return None if verdict is None or (foreign and options.any_platform) else refusal(verdict)

    done = import_parts(packed, store, refuse)
    for item in done:
        session.say(f"{item.outcome}: {item.part.manifest.op} {item.part.manifest.variant}: {item.part.path}")
    session.give({"store": str(store.root), "parts": [{**facts(i.part), "outcome": i.outcome} for i in done]})
    return 0


def gc(session: Session, options: argparse.Namespace) -> int:
    """Remove from the JIT store what nobody needs any more."""
    from deepspeed_ops.op_builder.cleaning import clean, forget

    store = Store(options.store.absolute()) if options.store else jit_store(session.settings)
    removed = forget(store, options.dry_run) if options.verdicts else ()
    removed += clean(store, options.days, everything=options.all, dry_run=options.dry_run)
    for item in removed:
        done = "would go" if options.dry_run else "removed" if item.gone else "is held by a process and stays"
        session.say(f"{done}: {item.path} ({item.why}, {item.size:,} bytes)")
    total = sum(item.size for item in removed if item.gone or options.dry_run)
    session.say(f"{'would free' if options.dry_run else 'freed'} {total:,} bytes in {store.root}")
    data = [{**asdict(item), "path": str(item.path)} for item in removed]
    session.give({"store": str(store.root), "dry_run": options.dry_run, "removed": data, "bytes": total})
    return 0 if options.dry_run or all(item.gone for item in removed) else StoreError.exit_code


# --- the command line ---------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="ds_ops", description="Built parts of compiled ops: look, build, carry, check.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead")

    def add(name: str, run: Any, ops: bool = True) -> argparse.ArgumentParser:
        text = str(run.__doc__)
        made_here = commands.add_parser(name, help=text, description=text, parents=[common])
        made_here.set_defaults(run=run)
        if ops:
            made_here.add_argument("ops", nargs="*", metavar="OP", help="names of ops; default: all")
        return made_here

    add("list", list_parts)
    add("which", which)
    add("build", build).add_argument(
        "--archs", help="GPU architectures, as in TORCH_CUDA_ARCH_LIST; default: those here"
    )
    add("verify", verify).add_argument("-v", "--verbose", action="store_true", help="also every comparison")
    out = add("export", export)
    out.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the archive to write")
    out.add_argument("--variant", action="append", help="only this variant (linux-x86_64, sm90); can be repeated")
    into = add("import", import_, ops=False)
    into.add_argument("file", type=Path, metavar="FILE", help="an archive of ds_ops export")
    into.add_argument("--into", type=Path, metavar="DIR", help="another store than the JIT store")
    into.add_argument("--any-platform", action="store_true", help="also parts for other platforms than this one")
    clean = add("gc", gc, ops=False)
    clean.add_argument("--days", type=float, default=30.0, help="parts not used for so long go (default 30)")
    clean.add_argument("--all", action="store_true", help="every part, log and old verdict goes")
    clean.add_argument("--verdicts", action="store_true", help="forget what loading taught: quarantine, crash markers")
    clean.add_argument("--dry-run", action="store_true", help="only say what would go")
    clean.add_argument("--store", type=Path, metavar="DIR", help="another store than the JIT store")
    return made


def main(arguments: Sequence[str], out: TextIO | None = None) -> int:
    """Run one command; its exit code.

    Args:
        arguments: command line without the program's name.
        out: where to; standard output by default.
    """
    options = parser().parse_args(list(arguments))
    out = sys.stdout if out is None else out
    try:
        return int(options.run(Session(Settings.read(), out, options.json), options))
    except OpsError as exc:
        if options.json:
            error = {"class": type(exc).__name__, "what": exc.what, "why": exc.why, "fix": exc.fix}
            out.write(json.dumps({"schema": SCHEMA, "error": error}, indent=2) + "\n")
        else:
            sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code


def cli_main() -> None:
    """Entry point of ``ds_ops``."""
    raise SystemExit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli_main()
