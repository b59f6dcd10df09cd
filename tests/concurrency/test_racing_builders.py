"""Many processes, one store: REPORTS rows "stale lock", "racing builders", "half-written library".

Every worker is a forked process that asks for the same op from an empty store. The compiler is real; a wrapper around
it counts its runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from op_builder.compile import build_part
from op_builder.plan import PartPlan, plan_host
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.store import Store, verify
from op_builder.toolchain import Toolchain, discover_host
from tests.toys import toy_home, toy_spec

if not hasattr(os, "fork"):
    pytest.skip("os.fork is missing: workers cannot be forked and killed", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS, ROUNDS = 8, 20
KILLED_ROUNDS = {3, 7, 11, 15, 19}
SETTINGS = Settings.read({k: v for k, v in os.environ.items() if not k.endswith("FLAGS")})


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    found = discover_host(SETTINGS, platform_facts())
    if found.host is None or found.ffi is None or found.ninja is None:
        pytest.skip(f"missing: a C++ compiler, ninja or apache-tvm-ffi ({found.problems})")
    return found


def counting_compiler(folder: Path, tools: Toolchain, sleep_s: float = 0.0) -> tuple[Path, Path]:
    """A wrapper around the C++ compiler and the file where it notes every compilation (not links, not questions)."""
    assert tools.host is not None
    log, script = folder / "compilations", folder / "counting-g++"
    log.touch()
    script.write_text(
        "#!/bin/sh\n"
        f'for word in "$@"; do if [ "$word" = -c ]; then echo x >> "{log}"; sleep {sleep_s}; fi; done\n'
        f'exec "{tools.host.argv[0]}" "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script, log


def runs(log: Path) -> int:
    return len(log.read_text(encoding="utf-8").splitlines())


def plan_with(script: Path, home: Path, tools: Toolchain) -> PartPlan:
    assert tools.host is not None
    wrapped = dataclasses.replace(tools, host=dataclasses.replace(tools.host, argv=(str(script),)))
    return plan_host(toy_spec(), wrapped, SETTINGS, platform_facts(), home / "csrc", "1.2.3")


def answer(path: Path) -> int:
    """Load a toy library and call it."""
    result = (ctypes.c_int64 * 2)()
    status = ctypes.CDLL(str(path))["__tvm_ffi_answer"](None, None, 0, ctypes.byref(result))
    assert status == 0
    return result[1]


def fork(work: Callable[[], None], complaints: Path) -> int:
    """Run ``work`` in a child that ends with 0, or with 1 and its traceback in ``complaints``."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        with complaints.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def kill_the_builder(root: Path, log: Path, children: list[int]) -> int:
    """SIGKILL the process that holds the lock while its compiler runs; its pid."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        holders = list((root / ".locks").glob("*.holder"))
        if runs(log) and holders:
            try:
                pid = int(json.loads(holders[0].read_text(encoding="utf-8"))["pid"])
            except (OSError, ValueError):
                continue  # it is being written, or its holder is gone
            assert pid in children
            os.kill(pid, signal.SIGKILL)
            return pid
        time.sleep(0.005)
    raise AssertionError("no builder was seen at work")


def race(
    folder: Path, tools: Toolchain, kill: bool, rng: random.Random, before: Callable[[], None] = lambda: None
) -> int:
    """One round on an empty store; every survivor has a library that works. Returns how often the compiler ran."""
    folder.mkdir()
    script, log = counting_compiler(folder, tools, 0.4 if kill else 0.0)
    part, root, complaints = (
        plan_with(script, toy_home(folder / "home"), tools),
        folder / "store",
        folder / "complaints",
    )
    delays = [rng.uniform(0, 0.05) for _ in range(WORKERS)]

    def work(delay: float) -> None:
        before()
        time.sleep(delay)
        got = build_part(part, Store(root), SETTINGS, None, tools.ninja)
        verify(got)
        assert answer(got.path) == 42

    children = [fork(lambda delay=delay: work(delay), complaints) for delay in delays]  # type: ignore[misc]
    killed = kill_the_builder(root, log, children) if kill else None
    for child in children:
        _, status = os.waitpid(child, 0)
        if child == killed:
            assert os.WTERMSIG(status) == signal.SIGKILL
        else:
            said = complaints.read_text(encoding="utf-8") if complaints.exists() else ""
            assert os.waitstatus_to_exitcode(status) == 0, said
    (found,) = Store(root).parts("toy")
    verify(found)  # type: ignore[arg-type]
    return runs(log)


def test_twenty_rounds_with_kills(tmp_path: Path, tools: Toolchain) -> None:
    """Fault (racing builders): a lost race, a second compilation, or a builder's death that takes the others along."""
    rng = random.Random("twenty rounds")
    for number in range(ROUNDS):
        kill = number in KILLED_ROUNDS
        assert race(tmp_path / str(number), tools, kill, rng) == (2 if kill else 1), f"round {number}"


def test_builders_without_locks_cannot_hurt_each_other(tmp_path: Path, tools: Toolchain) -> None:
    """Fault (half-written library): on a file system without locks one builder overwrites what another one loads."""
    import filelock

    def no_locks(self: object, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    rng = random.Random("no locks")
    for number in range(2):
        count = race(tmp_path / str(number), tools, False, rng, lambda: setattr(filelock.FileLock, "acquire", no_locks))
        assert 1 <= count <= WORKERS


def test_losers_who_see_nothing_use_their_private_copies(tmp_path: Path, tools: Toolchain) -> None:
    """Fault (NFS): the winner's part is not visible to the losers for a while, three times over."""
    import filelock

    def blind() -> None:
        def no_locks(self: object, *args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        filelock.FileLock.acquire = no_locks  # type: ignore[method-assign,assignment]
        Store.find = lambda *args: None  # type: ignore[method-assign,assignment]
        Store.discard = lambda *args: None  # type: ignore[method-assign]

    assert race(tmp_path / "x", tools, False, random.Random("blind"), blind) == WORKERS


def test_whole_processes_share_one_build(tmp_path: Path, tools: Toolchain) -> None:
    """Fault: the proofs above hold for forked children only, and not for ranks that each start their own Python."""
    script, log = counting_compiler(tmp_path, tools)
    home = toy_home(tmp_path / "home")
    (tmp_path / "store" / "deepspeed_ops" / "toy").mkdir(parents=True)
    (tmp_path / "store" / "deepspeed_ops" / "toy" / "lock").touch()  # what a killed builder of torch leaves behind
    code = (
        "import sys; from pathlib import Path\n"
        "from op_builder.loader import Loader; from tests.toys import toy_spec\n"
        "loader = Loader(home=Path(sys.argv[1]), spec_of=lambda _: toy_spec())\n"
        "print(loader.host_module('toy')['answer']())\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS") and not k.startswith("DS_")}
    env |= {"CXX": str(script), "TORCH_EXTENSIONS_DIR": str(tmp_path / "store"), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(home)], env=env, cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
        )
        for _ in range(3)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert out.strip() == "42", err
    assert runs(log) == 1
