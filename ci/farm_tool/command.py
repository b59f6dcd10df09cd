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
from op_builder.manifest import Manifest
from op_builder.store import Part

from . import (
    dockerfile,
    engines,
    images,
    own_engine,
    page,
    parts,
    pruning,
    pushing,
    records,
    sets,
    status,
    trial,
)
from .home import ROOT, Farm, settings_of
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
            bar.update(task, completed=done, total=total, description=last.partition(":")[0])

        yield replace(place, tick=tick, say=lambda line: bar.console.print(line, markup=False, highlight=False))


def build_parts(
    place: Workplace, name: str, wants: Sequence[sets.Want], with_host: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Build a set of parts; the record of the ship set and of the cell set is kept, a cell's own follows its image."""
    start = time.monotonic()
    with progress(place, name) as shown:
        made, rows = parts.build_set(shown, wants, with_host)
    record = records.of_parts(rows, time.monotonic() - start)
    if name in records.SETS:
        records.write(place.farm, name, record)
    say(f"{name}: {len(rows)} parts, {record['built']} built, {record['hits']} from the store, {record['seconds']} s")
    return made, record


def chosen_cells(options: argparse.Namespace, place: Workplace) -> list[Cell]:
    """The cells an invocation is about, in the order of the matrix."""
    named = {find_cell(name) for name in options.cells}
    if options.all:
        return list(cells())
    if options.changed:
        planned = status.plan(place, cells())
        return [cell for cell in cells() if status.status_of(cell, place, planned)["changed"]]
    return [cell for cell in cells() if cell in named]


def build_ship(options: argparse.Namespace, place: Workplace) -> int:
    """``build --ship``: what wheels and conda packages take."""
    if options.out is None:
        raise UsageError("build --ship needs a folder", "its parts are laid out for wheels and conda", "--out DIR")
    made, record = build_parts(place, "ship-set", sets.wants_of_ship(), not options.no_host)
    parts.export(made, options.out)
    say(f"wrote {options.out}: {record['bytes']} bytes")
    if options.record:
        say(f"recorded in {records.publish('ship set', record)}")
    return 0


def build(options: argparse.Namespace, place: Workplace) -> int:
    """``build``: the ship set, or cells with their images."""
    if options.ship:
        return build_ship(options, place)
    chosen = chosen_cells(options, place)
    if not chosen and options.changed:
        say("nothing changed")
        return 0
    if not chosen:
        raise UsageError("nothing to build", "no cell was named", "ci/farm build cpu, --changed, --all or --ship")
    whole = "cell-set" if options.all else chosen[0].name if len(chosen) == 1 else "cells"
    images_too = not (options.parts_only or options.no_host or options.out is not None)
    engine = engine_of(options, place) if images_too and any(cell.tags for cell in chosen) else None
    made, record = build_parts(place, whole, sets.wants_of_cells(chosen), not options.no_host)
    if options.out is not None:
        parts.export(made, options.out)
        say(f"wrote {options.out}: {record['bytes']} bytes")
    if options.no_host or options.out is not None:
        return 0
    for cell in chosen:
        mine = [p for p in made if p.manifest.kind == "host" or _belongs(p.manifest, cell)]
        build_cell(options, place, cell, mine, record, engine)
    if options.record and engine is None:
        say(f"recorded in {records.publish(whole.replace('-', ' ') if options.all else whole, record)}")
    return 0


def build_cell(
    options: argparse.Namespace,
    place: Workplace,
    cell: Cell,
    mine: list[Part],
    record: dict[str, Any],
    engine: engines.Engine | None,
) -> None:
    """Keep one cell's record, and build its image unless the engine has it already."""
    keys = {part.manifest.key for part in mine}
    rows = [row for row in record["parts"] if row["key"] in keys]
    one = {**record, "parts": rows, "bytes": sum(row["size"] for row in rows)}
    one["digest"] = images.cell_digest(cell, keys, place.home)
    before = records.read(place.farm, cell.name) or {}
    if before.get("digest") == one["digest"]:  # its image is still that of these parts
        one = {**{k: before[k] for k in images.IMAGE_KEYS if k in before}, **one}
    if engine is not None and cell.tags:
        same = one.get("engine") == engine.name and all(map(engine.has, (one.get("image", ""), *cell.tags)))
        if same and not options.rebuild:
            say(f"{', '.join(cell.tags)}: unchanged")
        else:
            say(f"building the image of {cell.name} with {engine.name}")
            index = options.torch_index.replace("{cuda}", cell.name.partition("-")[0])
            one |= images.build_image(cell, mine, place, engine, index, record["commit"])
            say(f"{', '.join(cell.tags)}: {one['image_bytes'] / 1e6:.0f} MB, {one['image_seconds']} s")
            if options.record:
                seconds = {"seconds": one["image_seconds"]}
                say(f"recorded in {records.publish(f'image {cell.name} by {engine.name}', {**one, **seconds})}")
    records.write(place.farm, cell.name, one)


def _belongs(manifest: Manifest, cell: Cell) -> bool:
    return cell.target is not None and (manifest.variant, manifest.compiler_release) == (cell.target.variant, cell.cuda)


def engine_of(options: argparse.Namespace, place: Workplace) -> engines.Engine:
    """The container engine of this invocation."""
    return engines.find_engine(options.engine, engines.client_env(os.environ, place.farm.engine))


def table(options: argparse.Namespace, place: Workplace) -> int:
    """``list``: every cell, its tag, compiler, torch, architecture, size and status."""
    from rich.console import Console
    from rich.table import Table

    planned = status.plan(place, cells())
    out = Table(box=None, pad_edge=False)
    for name in ("cell", "tag", "compiler", "torch", "arch", "size", "status"):
        out.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for cell in cells():
        row = status.status_of(cell, place, planned)
        size = row["image_bytes"] or row["parts_bytes"]
        tag = cell.tags[-1] if cell.tags else "(parts only)"
        by = (row["compiler"] or "").replace("nvidia-cuda-", "")
        text = f"{size / 1e6:,.1f} MB" if size else ""
        out.add_row(cell.name, tag, by, cell.torch or "", row["arch"] or "", text, row["status"])
    Console(width=None if sys.stdout.isatty() else 200).print(out)
    return 0


def plan(options: argparse.Namespace, place: Workplace) -> int:
    """``plan``: the cells that a build would build and what each lacks; with ``--json`` for CI's matrix."""
    chosen = [find_cell(name) for name in options.cells] or list(cells())
    planned = status.plan(place, cells())
    rows = [status.status_of(cell, place, planned) for cell in chosen if cell.tags or not options.images]
    registry = os.environ.get("FARM_REGISTRY", "")
    if options.changed and registry:
        engine = engine_of(options, place)
        rows = [r for r in rows if not pushing.is_there(find_cell(r["cell"]), r["digest"], registry, engine)]
    elif options.changed:
        rows = [row for row in rows if row["changed"]]
    rows = rows[: options.most]
    if options.names:
        sys.stdout.write(json.dumps([row["cell"] for row in rows]) + "\n")
    elif options.json:
        sys.stdout.write(json.dumps({"cells": rows}, indent=1) + "\n")
    else:
        for row in rows:
            lacking = len(row["parts"]) - row["in_store"]
            sys.stdout.write(f"{row['cell']}: {row['status']}, {lacking} of {len(row['parts'])} parts to compile\n")
    return 0


def render(options: argparse.Namespace, place: Workplace) -> int:
    """``render``: a standalone Dockerfile of one cell."""
    sys.stdout.write(dockerfile.render(find_cell(options.cell), place.home))
    return 0


def test(options: argparse.Namespace, place: Workplace) -> int:
    """``test``: what images promise, tried in hardened containers."""
    engine, failed = engine_of(options, place), 0
    for cell in [find_cell(name) for name in options.cells]:
        for name, attempt in trial.trials(cell, engine).items():
            try:
                sys.stdout.write(f"ok      {cell.name} {name}: {attempt()}\n")
            except OpsError as exc:
                failed += 1
                sys.stdout.write(f"FAILED  {cell.name} {name}: {exc}\n")
            sys.stdout.flush()
    return int(failed > 0)


def prune(options: argparse.Namespace, place: Workplace) -> int:
    """``prune``: delete what no cell and no set needs; ``--dry-run`` only says what."""
    freed = 0
    for path in pruning.candidates(place):
        freed += pruning.bytes_of(path)
        sys.stdout.write(f"{path.relative_to(place.farm.root)}\n")
        if not options.dry_run and not pruning.delete(path):
            say(f"somebody holds {path}")
    say(f"{freed / 1e6:.1f} MB {'could be' if options.dry_run else 'were'} freed")
    return 0


def push(options: argparse.Namespace, place: Workplace) -> int:
    """``push``: images to a registry."""
    engine = engine_of(options, place)
    for cell in [find_cell(name) for name in options.cells]:
        record = records.read(place.farm, cell.name) or {}
        if not record.get("image"):
            raise UsageError(f"{cell.name} was not built here", "its record has no image", f"ci/farm build {cell.name}")
        pushed = pushing.push(cell, record["digest"], options.to, engine)
        say(f"{cell.name}: " + (f"pushed {', '.join(pushed)}" if pushed else "the registry has this digest"))
    return 0


def report(options: argparse.Namespace, place: Workplace) -> int:
    """``report``: the static page."""
    made = page.page(page.gather(place, records.RESULTS))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(made, encoding="utf-8")
    say(f"wrote {options.out}")
    return 0


def own(options: argparse.Namespace, place: Workplace) -> int:
    """``engine``: the farm's own dockerd, and a base image without a registry."""
    docker = own_engine.OwnDocker(place.farm.engine)
    if options.action == "start":
        docker.start(place.say)
        say(f"dockerd listens on {docker.socket}")
    elif options.action == "stop":
        docker.stop()
    elif options.action == "remove":
        docker.remove()
    else:
        images.make_base(engine_of(options, place), place)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="ci/farm", description="Every CUDA x torch x architecture cell, one definition.")
    top.add_argument("--farm", type=Path, help="the farm's folder; default DS_FARM_DIR, else in the user's cache")
    top.add_argument("--jobs", type=int, help="parallel compilers; default: as many as cores and free memory allow")
    top.add_argument("--memory-gb", type=float, help="what they may take together")
    top.add_argument("--engine", help="docker or podman; default: the first that answers")
    commands = top.add_subparsers(dest="command", required=True)
    made = commands.add_parser("build", help="build the parts, and the images, of cells or of the ship set")
    made.add_argument("cells", nargs="*", metavar="CELL", help="names as ci/farm list shows them")
    made.add_argument("--all", action="store_true", help="every cell")
    made.add_argument("--ship", action="store_true", help="the parts of wheels and conda packages, into --out")
    made.add_argument("--out", type=Path, help="a folder of parts and manifests, made anew")
    made.add_argument("--changed", action="store_true", help="every cell that differs from its last build")
    made.add_argument("--parts-only", action="store_true", help="no images; needs no engine")
    made.add_argument("--torch-index", default=os.environ.get("DS_TORCH_INDEX", ""), help="torch's own wheel index")
    made.add_argument("--no-host", action="store_true", help="GPU parts only")
    made.add_argument("--rebuild", action="store_true", help="images too whose cell has not changed")
    made.add_argument("--record", action="store_true", help="append sizes and times to benchmarks/results/farm.json")
    made.set_defaults(run=build)
    shown = commands.add_parser("list", help="every cell")
    shown.set_defaults(run=table)
    planned = commands.add_parser("plan", help="what a build would do")
    planned.add_argument("cells", nargs="*", metavar="CELL")
    planned.add_argument("--json", action="store_true", help="for machines")
    planned.add_argument("--names", action="store_true", help="a JSON list of names: the axis of CI's matrix")
    planned.add_argument("--images", action="store_true", help="only cells with an image")
    changed = "only cells that differ from their last build, or that FARM_REGISTRY lacks where it is set"
    planned.add_argument("--changed", action="store_true", help=changed)
    planned.add_argument("--most", type=int, help="at most so many")
    planned.set_defaults(run=plan)
    rendered = commands.add_parser("render", help="print the Dockerfile of one cell")
    rendered.add_argument("cell", metavar="CELL")
    rendered.set_defaults(run=render)
    tried = commands.add_parser("test", help="try what images promise")
    tried.add_argument("cells", nargs="+", metavar="CELL")
    tried.set_defaults(run=test)
    pruned = commands.add_parser("prune", help="delete what no cell needs")
    pruned.add_argument("--dry-run", action="store_true")
    pruned.set_defaults(run=prune)
    pushed = commands.add_parser("push", help="push images to a registry, unless it has them")
    pushed.add_argument("cells", nargs="+", metavar="CELL")
    pushed.add_argument("--to", required=True, metavar="REGISTRY/NAMESPACE")
    pushed.set_defaults(run=push)
    shown = commands.add_parser("report", help="write the matrix as a static page")
    shown.add_argument("--out", type=Path, default=ROOT / "build" / "farm.html")
    shown.set_defaults(run=report)
    service = commands.add_parser("engine", help="a dockerd of the farm's own, on Debian")
    service.add_argument("action", choices=("start", "stop", "remove", "base"))
    service.set_defaults(run=own)
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
