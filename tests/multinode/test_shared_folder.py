"""Two hosts build the same op in one shared folder at once, 20 rounds, on a mount that behaves as NFS without lockd.

The kernel this was written on has no NFS, so the mount is played: each host has a FUSE mount of its own (bindfs) of the
same folder, with attributes and *absent names* cached for three seconds, and locks that the other host does not see (as
`nolock` mounts have it); in half of the rounds every lock is refused with ENOLCK besides (`no_locks.c`, preloaded).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, run

from op_builder.store import Part, Store, verify
from tests.toys import toy_home

ROUNDS = 20
HOSTS = ("node1", "node2")
OPTIONS = "attr_timeout=3,entry_timeout=3,negative_timeout=3,ac_attr_timeout=3"


@pytest.fixture(scope="module")
def shared(lab: Lab) -> Iterator[Path]:
    """The folder as this side sees it; on the hosts it is mounted at `mine ü/shared`."""
    folder = lab.root / "server" / "shared"
    folder.mkdir(parents=True)
    for name in HOSTS:
        (lab.nodes[name].root / "shared").mkdir()
        lab.nodes[name].inside("bindfs", "-o", OPTIONS, folder, lab.here / "shared")
    yield folder
    for name in HOSTS:
        lab.nodes[name].inside("umount", "-l", lab.here / "shared", check=False)


def workers(lab: Lab, preload: str) -> list[subprocess.Popen[str]]:
    """A builder on each host."""
    env = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS") and not k.startswith("DS_")}
    env |= {"LD_PRELOAD": preload} if preload else {}
    script = Path(__file__).with_name("shared_worker.py")
    made = []
    for name in HOSTS:
        argv = [
            "nsenter",
            "-t",
            str(lab.nodes[name].pid),
            "-m",
            "-n",
            "-u",
            "env",
            *(f"{k}={v}" for k, v in env.items()),
        ]
        made.append(
            subprocess.Popen(
                [*argv, sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
            )
        )
    return made


@pytest.mark.parametrize("locks", ["locks of one host only", "no locks at all"])
def test_two_hosts_build_at_once(lab: Lab, shared: Path, tmp_path: Path, locks: str) -> None:
    """Fault: a lost race, a part that is half there, an error because the other one's folder cannot be seen yet."""
    preload = ""
    if locks == "no locks at all":
        preload = str(tmp_path / "no_locks.so")
        run("gcc", "-shared", "-fPIC", "-O1", "-o", preload, Path(__file__).with_name("no_locks.c"))
    seen = lab.nodes["node1"].inside("findmnt", "-n", "-o", "FSTYPE", lab.here / "shared").stdout
    assert "fuse" in seen
    builders = workers(lab, preload)
    compiled = []
    for number in range(ROUNDS // 2):
        home = toy_home(tmp_path / f"home{number}", answer=number)
        name = f"{locks} {number} ü"
        for builder in builders:
            assert builder.stdin is not None
            builder.stdin.write(f"{lab.here}/shared/{name}\t{home}\n")
            builder.stdin.flush()
        said = [json.loads(builder.stdout.readline()) for builder in builders if builder.stdout is not None]
        assert all("error" not in s for s in said), said
        assert [s["answer"] for s in said] == [number, number]
        assert any(s["final"] for s in said), "one of them stands at its final path"
        compiled.append(sum(s["compiled"] for s in said))
        (part,) = Store(shared / name).parts("toy")
        assert isinstance(part, Part)
        verify(part)
    for builder in builders:
        assert builder.stdin is not None
        builder.stdin.close()
        assert builder.wait(timeout=30) == 0
    print(f"{locks}: compiled {compiled}")
    assert all(1 <= count <= 2 for count in compiled)
    assert max(compiled) == 2, "locks did not cross the hosts, or the rounds did not overlap: the test proves nothing"


def test_the_other_host_takes_what_is_there(lab: Lab, shared: Path, tmp_path: Path) -> None:
    """Fault: a shared folder, and every host builds its own."""
    home = toy_home(tmp_path / "home", answer=7)
    said = []
    for builder in workers(lab, ""):
        out, _ = builder.communicate(f"{lab.here}/shared/one after the other\t{home}\n", timeout=60)
        said.append(json.loads(out))
    assert [s["compiled"] for s in said] == [1, 0] and said[0]["sha256"] == said[1]["sha256"]
