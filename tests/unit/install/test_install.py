"""``ds_install`` without a network: host lists, the table, what pdsh prints, the one wheel, this machine alone."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_ops.op_builder.errors import UsageError

from deepspeed_ops.install import agent, command, source, table, transport
from deepspeed_ops.install.hosts import expand_nodelist, parse_hostfile, wanted
from deepspeed_ops.install.table import Row

ROOT = Path(__file__).resolve().parents[3]


# --- lists of hosts -----------------------------------------------------------------------------------------------


def test_hostfiles() -> None:
    """Fault: comments and blank lines become hosts, "slots=8" becomes a host (upstream passes both to pdsh)."""
    text = "# cluster\n\nnode1 slots=8\n  user@node-2.example slots=4 max_slots=8 # old\r\n\t\nnode3\n"
    assert parse_hostfile(text) == ["node1", "user@node-2.example", "node3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("a slots=x", "'slots=x' is not slots=N"),
        ("a slots", "'slots' is not slots=N"),
        ("a\nb\na slots=1", "line 3: 'a slots=1'"),
        ("a,b slots=1", "'a,b' is no name of a host"),
        ("-oProxyCommand=x", "is no name of a host"),
        ("$(reboot)", "is no name of a host"),
    ],
)
def test_wrong_hostfiles(text: str, said: str) -> None:
    """Fault: a slip in line 3 is found after two hosts were changed; a name that is an option or a command."""
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[001-003,7],x", ["n001", "n002", "n003", "n7", "x"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_slurms_node_lists(text: str, hosts: list[str]) -> None:
    """Fault: lost leading zeros; brackets passed on as they are."""
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a-b]", "n[1-2]]", "n[[1]]", "n[1-999999]", "; x"])
def test_wrong_node_lists(text: str) -> None:
    """Fault: an IndexError, or a million hosts."""
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST"):
        expand_nodelist(text)


def test_where_hosts_come_from(tmp_path: Path) -> None:
    """Fault: -l installs on a cluster; a hostfile that was asked for and is absent means "local"."""
    default, given = tmp_path / "default", tmp_path / "given"
    slurm = {"SLURM_JOB_NODELIST": "s[1-2]"}
    assert wanted(None, False, {}, default) == []
    assert wanted(None, False, slurm, default) == ["s1", "s2"]
    default.write_text("d slots=1\n", encoding="utf-8")
    given.write_text("\ufeffg slots=1\n", encoding="utf-8")
    assert wanted(None, False, slurm, default) == ["d"]
    assert wanted(given, False, slurm, default) == ["g"]
    assert wanted(given, True, slurm, default) == []
    with pytest.raises(UsageError, match="cannot be read"):
        wanted(tmp_path / "absent", False, slurm, default)


# --- the table ----------------------------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    """What a host reports, as far as the table reads it."""
    host = {"platform": "linux-x86_64", "libc": "glibc 2.36", "cpu_features": ["avx2"], "gpus": [], "driver": None}
    made = {"python": "3.11.7 (/x)", "torch": {"version": "2.6.0"}, "version": "0.1.0", "verdict": {"text": "ready"}}
    return {**made, "ops": [{"compatible": True}, {"compatible": False}], "host": {**host, **changes}}


def test_the_odd_one_is_pointed_at() -> None:
    """Fault: eight rows of numbers, and the reader has to find the one that differs."""
    gpu = {"gpus": [{"name": "H200"}] * 8, "driver": {"version": "550.54"}}
    odd = {**gpu, "driver": {"version": "535.1"}, "libc": "glibc 2.31"}
    rows = [Row(n, "installed", "", report(**gpu), "ab" * 32) for n in ("n1", "n2")]
    rows += [Row("n3", "already there", "", report(**odd), "ab" * 32), Row("n4", "failed", "cannot be reached")]
    assert table.differences(rows) == [
        "driver differs: n3: 535.1 (the others: 550.54)",
        "C library differs: n3: glibc 2.31 (the others: glibc 2.36)",
    ]
    lines = table.lines(rows)
    assert "8 x H200" in lines[2] and "1 of 2" in lines[2] and "abababababab" in lines[2]
    assert "535.1*" in lines[4] and "*" not in lines[2] + lines[3]
    assert lines[5].split()[:2] == ["n4", "-"] and lines[5].endswith("failed: cannot be reached")


def test_two_hosts_have_no_majority() -> None:
    """Fault: one of two is called the odd one."""
    rows = [Row("a", "installed", "", report()), Row("b", "installed", "", report(platform="linux-aarch64"))]
    assert table.differences(rows) == ["platform differs: a: linux-x86_64; b: linux-aarch64"]
    assert table.differences(rows[:1]) == [] and table.differences([Row("x", "failed", "y")]) == []


# --- talking to hosts ---------------------------------------------------------------------------------------------


def test_answers_survive_noise_and_long_lines() -> None:
    """Fault: a message of the day, or pdsh's line length, breaks the one answer that counts."""
    facts = {"report": {"text": "ü" * 5000}}
    said = subprocess.run(
        [sys.executable, "-c", f"import json,sys;sys.path.insert(0,{str(ROOT / 'src')!r})\n"
         f"from deepspeed_ops.install import agent;print('motd');"
         f"agent.answer(json.loads({json.dumps(facts)!r}));print('bye')"],
        capture_output=True, encoding="utf-8", timeout=60, check=True,
    ).stdout  # fmt: skip
    assert max(map(len, said.splitlines())) < 1000
    assert transport.answer_of(said) == facts
    assert transport.answer_of("motd\n") is None and transport.answer_of("ds_install:%%%\n") is None


def test_the_agent_runs_as_it_is_sent(tmp_path: Path) -> None:
    """Fault: the agent needs a module of ours, which no host has yet; an old Python dies of a syntax error."""
    argv = transport.agent_argv({"steps": []})
    done = subprocess.run(
        [sys.executable, "-I", *argv], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60, check=True
    )
    assert transport.answer_of(done.stdout) == {}
    first = argv[1].partition("exec(")[0]
    old = first.replace("sys.version_info < (3, 10)", "True")
    said = subprocess.run([sys.executable, "-c", old], capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert said.returncode == 1 and "too old: Python" in said.stdout and "--python" in said.stdout


def test_failures_in_words() -> None:
    """Fault: "exit 255"."""
    lost = transport.Outcome(255, "ssh: connect to host n port 22: Connection refused\n")
    assert lost.reason == "cannot be reached, or was lost: ssh: connect to host n port 22: Connection refused"
    assert "No space left" in transport.Outcome(1, "cat: write error: No space left on device\nbye\n").reason


def test_pdshs_lines_find_their_host() -> None:
    """Fault: a failure is attributed to the wrong host, or to none."""
    names = {"n1": "me@n1", "n2": "n2"}
    assert transport.attribute("n1: a: b", names) == ("me@n1", "a: b")
    assert transport.attribute("pdcp@here: n2: ssh exited with exit code 255", names)[0] == "n2"
    assert transport.attribute("n2:", names) == ("n2", "")
    assert transport.attribute("noise without a host", names)[0] is None


def order(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    base = {"sha256": "0" * 64, "size": 10, "names": ["no-such-distribution"], "rivals": [], "file": "x.whl"}
    return {**base, "sudo": False, "mirror": "", "extras": "", "folder": str(tmp_path), **changes}


def test_a_copy_that_is_not_whole_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: half a wheel is given to pip, after the old version was removed."""
    monkeypatch.setattr(agent, "pip", lambda *a: pytest.fail("pip was asked"))
    assert "did not arrive" in agent.install(order(tmp_path))["error"]
    (tmp_path / "x.whl").write_bytes(b"half")
    assert "incomplete: 4 of 10 bytes" in agent.install(order(tmp_path))["error"]


def test_a_host_without_room_says_so_before_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: found out after everything was sent."""
    monkeypatch.setattr(agent.tempfile, "gettempdir", lambda: str(tmp_path))
    assert "folder" in agent.look(order(tmp_path))
    assert "No space left" in agent.look(order(tmp_path, size=1 << 60))["error"]


# --- the wheel, and this machine ----------------------------------------------------------------------------------


def test_what_decides_a_wheel_decides_its_digest(tmp_path: Path) -> None:
    """Fault: an edited kernel, or another DS_BUILD_OPS, and the old wheel is installed again."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cu").write_text("1", encoding="utf-8")
    first = source.digest(tmp_path, {})
    assert source.digest(tmp_path, {"HOME": "x"}) == first
    assert source.digest(tmp_path, {"DS_BUILD_OPS": "1"}) != first
    (tmp_path / "csrc" / "a.cu").write_text("2", encoding="utf-8")
    assert source.digest(tmp_path, {}) != first


def test_a_wheel_is_taken_again_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every run makes another wheel, so every host gets everything again."""
    (tmp_path / "setup.py").touch()
    builds = []

    def pip(argv: list[str], **terms: Any) -> Any:
        builds.append(argv)
        (tmp_path / "dist" / f"deepspeed-{len(builds)}-py3-none-any.whl").write_bytes(b"wheel")
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(source.subprocess, "run", pip)
    said: list[str] = []
    first = source.wheel_of(tmp_path, {}, [], False, said.append)
    assert source.wheel_of(tmp_path, {}, [], False, said.append) == first and len(builds) == 1
    assert "nothing changed" in said[-1]
    first.write_bytes(b"damaged")
    assert source.wheel_of(tmp_path, {}, [], False, said.append).name == "deepspeed-2-py3-none-any.whl"
    assert not first.exists(), "earlier builds are cleaned away"
    source.wheel_of(tmp_path, {"DS_BUILD_OPS": "1"}, [], True, said.append)
    assert len(list((tmp_path / "dist").glob("*.whl"))) == 2, "-n keeps them"


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    """Fault: forty lines of pip; the typed error that names op and fix is in line 12."""
    text = "Collecting\n  error: op cpu_adam was asked for and cannot be built\n    why: no g++\n    fix: install\n"
    text += "  note: x\nERROR: Failed"
    assert source.reason(text).splitlines() == [
        "op cpu_adam was asked for and cannot be built",
        "why: no g++",
        "fix: install",
    ]
    hook = "error: subprocess-exited-with-error\n  deepspeed_ops.op_builder.errors.SettingError: DS_BUILD_X='1' names\n"
    assert source.reason(f"{hook}  why: no op\n  fix: Y\n  [end of output]\n").splitlines() == [
        "DS_BUILD_X='1' names",
        "why: no op",
        "fix: Y",
    ]
    assert source.reason("a\nERROR: Could not\n") == "ERROR: Could not"


@pytest.mark.parametrize("word", ["--bogus", "-x"])
def test_unknown_options_end_with_1(word: str, capsys: Any) -> None:
    """Fault: exit 2 where DeepSpeed's install.sh ends with 1."""
    with pytest.raises(SystemExit) as caught:
        command.main([word])
    assert caught.value.code == 1 and "usage: install.sh" in capsys.readouterr().err


def test_every_option_of_deepspeed_is_there() -> None:
    """Fault: a script that calls install.sh with one of them breaks."""
    options = command.parser().parse_args(["-l", "-s", "-r", "-n", "-m", "http://mirror", "-H", "file", "-e", "-v"])
    assert (options.local_only, options.pip_sudo, options.allow_sudo, options.no_clean) == (True, True, True, True)
    assert (options.pip_mirror, str(options.hostfile), options.examples, options.verbose) == (
        "http://mirror",
        "file",
        True,
        True,
    )
    long = "--local_only --pip_sudo --allow_sudo --no_clean --pip_mirror u --hostfile f --examples --verbose"
    assert command.parser().parse_args(long.split()).examples


def test_root_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Fault: files of root in a user's environment."""
    monkeypatch.setattr(command.os, "geteuid", lambda: 0, raising=False)
    assert command.main(["-l"]) == UsageError.exit_code and "-r allows it" in capsys.readouterr().err


def test_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Fault: the local path is another program than the one for many hosts, and nobody tries it."""
    wheel = tmp_path / "deepspeed-0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    asked: list[dict[str, Any]] = []

    def call(argv: list[str], timeout_s: float, *, env: dict[str, str]) -> transport.Outcome:
        assert "PYTHONPATH" not in env
        told = json.loads(base64.b64decode(argv[-1]))
        asked.append(told)
        said = {"folder": str(tmp_path / "to")} if told["steps"] == ["look"] else {"installed": {}, "report": report()}
        text = base64.b64encode(json.dumps(said).encode()).decode()
        return transport.Outcome(0, f"{agent.MARK}{text}\n")

    (tmp_path / "to").mkdir()
    monkeypatch.setattr(transport, "call", call)
    monkeypatch.setenv("PYTHONPATH", "/checkout/src")
    monkeypatch.setattr(command.os, "geteuid", lambda: 1000, raising=False)
    assert command.main(["-l", "-e", "-m", "http://mirror", "--wheel", str(wheel)]) == 0
    out, err = capsys.readouterr()
    assert [a["steps"] for a in asked] == [["look"], ["install", "report"]]
    assert asked[0]["extras"] == "demo" and asked[0]["mirror"] == "http://mirror"
    assert (tmp_path / "to" / wheel.name).read_bytes() == b"wheel"
    assert "localhost" in out and "1 of 1 hosts are done" in out and "[3/3] localhost: install" in err


def test_install_sh_is_thin() -> None:
    """Fault: the shell grows a second logic beside ds_install."""
    text = (ROOT / "install.sh").read_text(encoding="utf-8")
    assert "deepspeed_ops.install.command" in text and len(text.splitlines()) < 15
    done = subprocess.run(
        ["bash", str(ROOT / "install.sh"), "-h"], capture_output=True, encoding="utf-8", timeout=60, check=False,
        stdin=subprocess.DEVNULL, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0 and "--pip_mirror" in done.stdout
