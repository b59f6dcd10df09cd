"""``ds_io``: measure how fast a folder's disk is, find the best settings for ``aio_handle``, show them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_ops.op_builder.errors import OpsError, UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """``"128K"`` in bytes.

    >>> parse_size("1M"), parse_size("4096")
    (1048576, 4096)
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 128K, 1M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def size_text(nbytes: int) -> str:
    """The inverse of :func:`parse_size`, in the largest unit without a remainder.

    >>> size_text(131072), size_text(1000)
    ('128K', '1000')
    """
    unit = next((u for u in ("G", "M", "K") if nbytes % _UNITS[u] == 0), "")
    return f"{nbytes // _UNITS[unit]}{unit}"


def _list(kind: Any) -> Any:
    return lambda text: [kind(word) for word in text.split(",") if word.strip()]


def _count(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="ds_io", description=__doc__)
    made.add_argument("folder", nargs="?", type=Path, default=Path(), help="on the disk to measure; default: here")
    made.add_argument(
        "--size", type=parse_size, default=512 << 20, help="of the file that is written there, and removed"
    )
    made.add_argument("--block-size", type=_list(parse_size), default=[128 << 10, 1 << 20, 8 << 20], metavar="LIST")
    made.add_argument("--queue-depth", type=_list(_count), default=[8, 32, 128], metavar="LIST")
    made.add_argument("--threads", type=_list(_count), default=[1], metavar="LIST")
    backend = "auto: the first that works (default); all: each that works"
    made.add_argument("--backend", type=_list(str), default=["auto"], metavar="LIST", help=backend)
    made.add_argument("--only", choices=("read", "write"), help="one direction")
    made.add_argument("--repeats", type=_count, default=3)
    made.add_argument(
        "--fio", action=argparse.BooleanOptionalAction, default=None, help="default: where it is installed"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the best settings and every figure")
    made.add_argument("--png", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")
    return made


def sweep_of(options: argparse.Namespace) -> Any:
    """The sweep that the options ask for.

    Raises:
        UsageError: --png without matplotlib, --fio without fio.
    """
    from deepspeed_ops import fio
    from deepspeed_ops.aio import backends
    from deepspeed_ops.io_sweep import Sweep

    if options.fio and fio.find_fio() is None:
        raise UsageError("--fio: fio was not found", "it is not on PATH", "apt-get install fio (dnf install fio)")
    if options.png is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as exc:
            raise UsageError("--png: matplotlib was not found", str(exc), "pip install matplotlib") from exc
    working = [name for name, (works, _) in backends().items() if works]
    chosen = working if options.backend == ["all"] else [working[0] if b == "auto" else b for b in options.backend]
    directions = {"read": [False], "write": [True], None: [True, False]}[options.only]
    with_fio = fio.find_fio() is not None if options.fio is None else options.fio
    return Sweep(
        options.folder, options.size, options.block_size, options.queue_depth, options.threads, chosen, directions,
        options.repeats, with_fio,
    )  # fmt: skip


def show(found: Sequence[Any], chosen: Any) -> None:
    """A table of every figure, the best marked."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title="GB/s, median of the repeats", title_justify="left")
    for name in ("", "backend", "block", "depth", "threads", "GB/s", "CPU s/GB", "fio GB/s", "of fio"):
        out.add_column(name, justify="left" if name in ("", "backend") else "right")
    for one in found:
        s, ratio = one.setting, one.of_fio
        peer = (f"{one.median / ratio:.2f}", f"{100 * ratio:.0f} %") if ratio else ("", "")
        row = ["write" if one.write else "read", s.backend, size_text(s.block_size), str(s.queue_depth), str(s.threads)]
        row += [f"{one.median:.2f}", f"{one.cpu_s_per_gb:.2f}", *peer]
        out.add_row(*row, style="bold green" if s == chosen else None)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(out)
    if not all(one.direct for one in found):
        console.print("This file system has no direct I/O: the figures are those of memory, not of a disk.")
    console.print(f"best: {json.dumps(settings_of(chosen)['aio'])}, backend {chosen.backend}")


def settings_of(chosen: Any) -> dict[str, Any]:
    """The settings in the words of DeepSpeed's configuration, and the backend."""
    aio = {
        "block_size": chosen.block_size, "queue_depth": chosen.queue_depth, "intra_op_parallelism": chosen.threads,
        "single_submit": False, "overlap_events": True,
    }  # fmt: skip
    return {"aio": aio, "backend": chosen.backend}


def as_json(found: Sequence[Any], chosen: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, best settings first."""
    rows = [
        {
            **settings_of(one.setting)["aio"],
            "backend": one.setting.backend, "direction": "write" if one.write else "read",
            "gbps": round(one.median, 4), "repeats_gbps": [round(x, 4) for x in one.gbps],
            "cpu_s_per_gb": round(one.cpu_s_per_gb, 4), "direct": one.direct,
            "fio_gbps": [round(x, 4) for x in one.fio_gbps],
        }
        for one in found
    ]  # fmt: skip
    return {**settings_of(chosen), "folder": str(options.folder.absolute()), "size": options.size, "measured": rows}


def draw(found: Sequence[Any], path: Path) -> None:
    """Bandwidth over queue depth: a panel per direction, a line per backend and block size, fio dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    directions = sorted({one.write for one in found})
    top = max(rate for one in found for rate in (one.median, *one.fio_gbps))
    figure, axes = plt.subplots(1, len(directions), figsize=(6.4 * len(directions), 4.8), sharey=True, squeeze=False)
    for axis, write in zip(axes[0], directions, strict=True):
        lines: dict[tuple[str, int, int], list[Any]] = {}
        for one in found:
            if one.write == write:
                key = (one.setting.backend, one.setting.block_size, one.setting.threads)
                lines.setdefault(key, []).append(one)
        for (backend, block, threads), many in lines.items():
            depths = [m.setting.queue_depth for m in many]
            label = f"{backend} {size_text(block)}, {threads} thread{'s' if threads > 1 else ''}"
            (drawn,) = axis.plot(depths, [m.median for m in many], marker="o", label=label)
            if all(m.fio_gbps for m in many):
                peers = [m.median / (m.of_fio or 1.0) for m in many]
                axis.plot(depths, peers, linestyle="--", color=drawn.get_color(), alpha=0.6)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({m.setting.queue_depth for m in found}), minor=False)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(title="write" if write else "read", xlabel="queue depth", ylabel="GB/s", ylim=(0, 1.1 * top))
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize="x-small", title="dashed: fio" if any(m.fio_gbps for m in found) else None)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show; the exit code of the error if it fails."""
    options = parser().parse_args(arguments)
    try:
        sweep = sweep_of(options)
        moved = sweep.size * len(sweep.settings()) * sweep.repeats * (2 if sweep.with_fio else 1)
        ways = " and ".join("writes" if write else "reads" for write in sweep.directions)
        sys.stderr.write(f"{ways} {moved / 1e9:.0f} GB on the disk of {sweep.folder.absolute()}\n")
        found = _with_progress(sweep)
    except OpsError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    from deepspeed_ops.io_sweep import best

    chosen = best(found)
    show(found, chosen)
    if options.json is not None:
        text = json.dumps(as_json(found, chosen, options), indent=2) + "\n"
        options.json.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {options.json}\n")
    if options.png is not None:
        draw(found, options.png)
        sys.stdout.write(f"wrote {options.png}\n")
    return 0


def _with_progress(sweep: Any) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from deepspeed_ops import io_sweep

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = len(sweep.settings()) * len(sweep.directions) * sweep.repeats
        task = progress.add_task("", total=total)
        done = -1

        def step(text: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=text, completed=done)

        return io_sweep.run(sweep, step)


def cli_main() -> None:
    """Entry point of the command ``ds_io``."""
    sys.exit(main())


if __name__ == "__main__":
    cli_main()
