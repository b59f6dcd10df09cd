"""Arguments in, exit code out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from op_builder.cells import Cell, cells, find_cell
from op_builder.errors import OpsError, UsageError

from . import parts, records, sets
from .home import Farm, settings_of
from .parts import Workplace


def say(line: str) -> None:
    """A line for people, beside whatever goes to standard output."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def progress(place: Workplace, title: str) -> Iterator[Workplace]:
    """A progress bar on a terminal; elsewhere one line a part."""
    if not sys.stderr.isatty():
        yield replace(place, tick=lambda done, total, last: say(f"{title} {done}/{total} {last}"))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, title=title)

        def tick(done: int, total: int, last: str) -> None:
            bar.update(task, completed=done, total=total, description=last)

        yield replace(place, tick=tick, say=lambda line: bar.console.print(line, markup=False, highlight=False))


def build_parts(
    place: Workplace, name: str, wants: Sequence[sets.Want], with_host: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Build a set of parts and keep its record."""
    start = time.monotonic()
    with progress(place, name) as shown:
        made, rows = parts.build_set(shown, wants, with_host)
    record = records.of_parts(rows, time.monotonic() - start)
    records.write(place.farm, name, record)
    say(f"{name}: {len(rows)} parts, {record['built']} built, {record['hits']} from the store, {record['seconds']} s")
    return made, record


def chosen_cells(options: argparse.Namespace, place: Workplace) -> list[Cell]:
    """The cells an invocation is about, in the order of the matrix."""
    named = {find_cell(name) for name in options.cells}
    if options.all:
        return list(cells())
    return [cell for cell in cells() if cell in named]


def build(options: argparse.Namespace, place: Workplace) -> int:
    """``build``: parts of the ship set or of cells."""
    if options.ship:
        if options.out is None:
            raise UsageError("build --ship needs a folder", "its parts are laid out for wheels and conda", "--out DIR")
        made, record = build_parts(place, "ship-set", sets.wants_of_ship(), not options.no_host)
        parts.export(made, options.out)
        say(f"wrote {options.out}: {record['bytes']} bytes")
        if options.record:
            say(f"recorded in {records.publish('ship set', record)}")
        return 0
    chosen = chosen_cells(options, place)
    if not chosen:
        raise UsageError("nothing to build", "no cell was named", "ci/farm build cpu, --ship or --all")
    name = chosen[0].name if len(chosen) == 1 else "cell-set" if options.all else "cells"
    made, record = build_parts(place, name, sets.wants_of_cells(chosen), not options.no_host)
    if options.out is not None:
        parts.export(made, options.out)
        say(f"wrote {options.out}: {record['bytes']} bytes")
    if options.record:
        say(f"recorded in {records.publish('cell set' if options.all else name, record)}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="ci/farm", description="Every CUDA x torch x architecture cell, one definition.")
    top.add_argument("--farm", type=Path, help="the farm's folder; default DS_FARM_DIR, else in the user's cache")
    top.add_argument("--jobs", type=int, help="parallel compilers; default: as many as cores and free memory allow")
    top.add_argument("--memory-gb", type=float, help="what they may take together")
    commands = top.add_subparsers(dest="command", required=True)
    made = commands.add_parser("build", help="build the parts, and the images, of cells or of the ship set")
    made.add_argument("cells", nargs="*", metavar="CELL", help="names as ci/farm list shows them")
    made.add_argument("--all", action="store_true", help="every cell")
    made.add_argument("--ship", action="store_true", help="the parts of wheels and conda packages, into --out")
    made.add_argument("--out", type=Path, help="a folder of parts and manifests, made anew")
    made.add_argument("--no-host", action="store_true", help="GPU parts only")
    made.add_argument("--record", action="store_true", help="append sizes and times to benchmarks/results/farm.json")
    made.set_defaults(run=build)
    return top


def main(arguments: list[str]) -> int:
    """Run a command; the exit code of the error if it fails."""
    options = parser().parse_args(arguments)
    env = dict(os.environ)
    place = Workplace(Farm.of(env, options.farm), settings_of(env, options.jobs, options.memory_gb), say=say)
    try:
        return int(options.run(options, place))
    except OpsError as exc:
        say(f"error: {exc}")
        return exc.exit_code
    except KeyboardInterrupt:
        say("stopped; what was finished is kept, the same command goes on from there")
        return 130
