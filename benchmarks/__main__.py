"""``python -m benchmarks [NAME...] [--quick] [--out FOLDER]``: run benchmarks and append to results/<name>.json."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

NAMES = (
    "startup",
    "cpu_adam",
    "cpu_lion",
    "cpu_adagrad",
    "fused_adam",
    "fused_lion",
    "fused_lamb",
    "convergence",
    "cpu_pairs",
    "tensor_store",
    "async_io",
)


def main() -> None:
    """Run the benchmarks named, default: all."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repetitions")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON, default: benchmarks/results")
    options = parser.parse_args()
    for name in options.names or NAMES:
        importlib.import_module(f"benchmarks.{name}").run(options.out, options.quick)


if __name__ == "__main__":
    main()
