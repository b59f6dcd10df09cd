"""``ds_ops`` as its users call it: a part built here travels to a machine without a compiler, and bad ones do not."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ops import ops_command, ops_verify
from op_builder.errors import LoadFailed, NoMatchingPart, UsageError
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.store import Part, Store
from op_builder.toolchain import discover_host
from tests.toys import put

ROOT = Path(__file__).resolve().parents[3]
OP = "cpu_lion"


def call(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a call."""
    out = io.StringIO()
    code = ops_command.main([*map(str, arguments), "--json"], out)
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one op, built by the command, in a folder with a blank and letters beyond ASCII."""
    found = discover_host(Settings.read(), platform_facts())
    if found.host is None or found.ffi is None or found.ninja is None:
        pytest.skip(f"missing: a C++ compiler, ninja or apache-tvm-ffi ({found.problems})")
    store = tmp_path_factory.mktemp("ds ops") / "störe 构建"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(store))
        code, said = call("build", OP)
    assert code == 0 and [p["op"] for p in said["parts"]] == [OP]
    return store


@pytest.fixture
def at(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine that built it."""
    for name in [k for k in os.environ if k.endswith("FLAGS") or k.startswith("DS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    return built


def elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Another machine: an empty store, no compiler on PATH, and none allowed."""
    for name in ("CXX", "CC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DS_JIT", "0")
    return folder / "deepspeed_ops"


def test_a_part_travels_to_a_machine_without_a_compiler(at: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: what was built on the one machine that has a compiler has to be built again on all that have none."""
    archive = tmp_path / "parts of ünser.dsops"
    code, sent = call("export", OP, "-o", archive)
    assert code == 0
    store = elsewhere(monkeypatch, tmp_path / "other machine")
    assert call("which", OP)[0] == NoMatchingPart.exit_code
    code, got = call("import", archive)
    assert code == 0 and [p["outcome"] for p in got["parts"]] == ["imported"]
    assert [p["sha256"] for p in got["parts"]] == [p["sha256"] for p in sent["parts"]]
    assert str(store) in got["parts"][0]["path"]
    assert call("which", OP)[1]["resolutions"][0]["action"] == "load"
    code, checked = call("verify", OP)
    assert code == 0 and checked["ops"][0]["state"] == "ok" and len(checked["ops"][0]["cases"]) == 3
    assert checked["ops"][0]["part"] == got["parts"][0]["path"]
    assert [p["state"] for p in call("list", OP)[1]["parts"]] == ["ok"]


def test_a_part_for_another_platform_is_refused(at: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: the wrong CPU's library in the store; found out at the first use, by an error of the loader."""
    archive = tmp_path / "parts.dsops"
    call("export", OP, "-o", archive)
    store = elsewhere(monkeypatch, tmp_path / "arm")
    arm = dataclasses.replace(ops_command.detect(os.environ), machine="aarch64")
    monkeypatch.setattr(ops_command, "detect", lambda env: arm)
    code, said = call("import", archive)
    assert code == NoMatchingPart.exit_code
    assert said["error"]["class"] == "NoMatchingPart" and "linux-aarch64" in said["error"]["why"]
    assert not list(store.rglob("*.so"))
    code, said = call("import", archive, "--any-platform")
    assert code == 0 and [p["outcome"] for p in said["parts"]] == ["imported"]


def test_a_part_of_other_sources_is_refused(at: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: an archive of another release fills the store with what no loader will take."""
    (part,) = Store(at / "deepspeed_ops").parts(OP)
    assert isinstance(part, Part)
    stale = put(
        Store(tmp_path / "s"), dataclasses.replace(part.manifest, source_digest="0" * 64), part.path.read_bytes()
    )
    from op_builder.archive import export_parts

    export_parts([stale], tmp_path / "old.dsops", "0")
    code, said = call("import", tmp_path / "old.dsops")
    assert code == NoMatchingPart.exit_code and "sources" in said["error"]["why"]


def test_states_are_told_apart(at: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: "a part is there", and it is damaged, stale, foreign or quarantined."""
    (part,) = Store(at / "deepspeed_ops").parts(OP)
    assert isinstance(part, Part)
    own, data = Store(tmp_path / "mine"), part.path.read_bytes()
    made = {
        "ok": part.manifest,
        "stale": dataclasses.replace(part.manifest, key="s" * 64, source_digest="0" * 64),
        "unfit": dataclasses.replace(part.manifest, key="u" * 64, platform="linux-other"),
        "damaged": dataclasses.replace(part.manifest, key="d" * 64),
        "quarantined": dataclasses.replace(part.manifest, key="q" * 64),
    }
    paths = {state: put(own, m, data + b"\0" * (state == "quarantined")) for state, m in made.items()}
    paths["damaged"].path.write_bytes(b"cut")
    monkeypatch.setenv("DS_OPS_PATH", str(own.root))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "empty"))
    session = ops_command.Session(Settings.read(), io.StringIO(), True)
    session.loader.quarantine(paths["quarantined"], "it killed somebody")
    code, said = call("list", OP)
    states = {p["path"]: (p["state"], p["why"]) for p in said["parts"]}
    assert code == 0 and {str(p.path): s for s, p in paths.items()} == {p: s for p, (s, _) in states.items()}
    assert "it killed somebody" in states[str(paths["quarantined"].path)][1]
    out = io.StringIO()
    assert ops_command.main(["list", OP], out) == 0
    assert all(state in out.getvalue() for state in made)


def child(tmp_path: Path, text: str) -> tuple[str, ...]:
    script = tmp_path / "child.py"
    script.write_text(text, encoding="utf-8")
    return (str(script),)


LOADED = "import json, os, signal\nprint(json.dumps({'stage': 'loaded', 'part': 'p', 'sha256': SHA}), flush=True)\n"
CASE = {"what": "x", "worst": 1, "bound": 0, "good": False}
WRONG = f"print(json.dumps({{'stage': 'checked', 'note': '', 'cases': [{CASE}]}}))"


@pytest.mark.parametrize(
    ("code", "state", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", "died", "SIGILL while its numbers were checked"),
        ("os._exit(1)", "died", "ended with 1"),
        (WRONG, "wrong numbers", "x: off by 1"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX are missing")
def test_what_dies_or_is_wrong_is_quarantined(
    at: Path, tmp_path: Path, monkeypatch: Any, code: str, state: str, said: str
) -> None:
    """Fault: a part that gives wrong numbers goes on giving them; a check that takes the checker along."""
    (part,) = Store(at / "deepspeed_ops").parts(OP)
    assert isinstance(part, Part)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "jit"))
    put(Store(tmp_path / "jit" / "deepspeed_ops"), part.manifest, part.path.read_bytes())
    loader = ops_command.Session(Settings.read(), io.StringIO(), True).loader
    script = child(tmp_path, f"SHA = {part.manifest.sha256!r}\n{LOADED}{code}\n")
    verdict = ops_verify.verify(loader, OP, 60, script)
    assert (verdict.state, verdict.quarantined) == (state, True) and said in verdict.why
    trace = loader.resolution(OP, looked=False).explain()
    assert "quarantined: ds_ops verify" in trace and said in trace
    assert call("gc", "--verdicts")[0] == 0
    assert call("list", OP)[1]["parts"][0]["state"] == "quarantined", "this process keeps its own verdicts"
    loader.state.refused.clear()
    assert call("list", OP)[1]["parts"][0]["state"] == "ok"


def test_a_child_that_hangs_is_ended(at: Path, tmp_path: Path) -> None:
    """Fault: a check that never returns."""
    loader = ops_command.Session(Settings.read(), io.StringIO(), True).loader
    verdict = ops_verify.verify(loader, OP, 0.5, child(tmp_path, "import time; time.sleep(60)"))
    assert verdict.state == "too slow" and not verdict.good


def test_an_op_that_is_not_here_and_one_that_lies_nowhere(at: Path, tmp_path: Path, capsys: Any) -> None:
    """Fault: a traceback, exit code 0, or an empty archive."""
    assert call("which", "cpu_lionn")[1]["error"]["fix"] == "use 'cpu_lion'"
    assert call("export", "cpu_adagrad", "-o", tmp_path / "x")[0] == UsageError.exit_code
    assert not (tmp_path / "x").exists()
    assert ops_command.main(["which", "nope"], io.StringIO()) == UsageError.exit_code
    assert "error: no op is named 'nope'" in capsys.readouterr().err


def test_gc_says_what_it_frees(at: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: a dry run that deletes; an object that JSON cannot hold."""
    (part,) = Store(at / "deepspeed_ops").parts(OP)
    assert isinstance(part, Part)
    copy = put(Store(tmp_path), part.manifest, part.path.read_bytes())
    code, said = call("gc", "--all", "--dry-run", "--store", tmp_path)
    assert code == 0 and copy.path.exists() and said["bytes"] > part.manifest.size
    code, said = call("gc", "--all", "--store", tmp_path)
    assert code == 0 and not copy.path.exists() and [r["gone"] for r in said["removed"]] == [True]


def test_every_kernel_has_a_numeric_check() -> None:
    """Fault: an op whose numbers nobody can look at on a stranger's machine."""
    from deepspeed_ops.numeric import has_check

    assert [n for n, s in all_specs().items() if (s.kernels or s.simd) and not has_check(n)] == []


def test_the_numeric_check_sees_a_broken_kernel() -> None:
    """Fault: a check that a kernel passes which does nothing, leaves the tail, or turns a sign."""
    torch = pytest.importorskip("torch")
    from deepspeed_ops.numeric import formulas

    class Broken(torch.optim.AdamW):  # type: ignore[misc,name-defined]
        def __init__(self, params: Any, fault: str, **options: Any) -> None:
            super().__init__(params, **options)
            self.fault = fault

        def step(self, closure: Any = None) -> None:
            group = self.param_groups[0]["params"]
            before = [p.detach().clone() for p in group]
            super().step(closure)
            for p, old in zip(group, before, strict=True):
                with torch.no_grad():
                    if self.fault == "no-op":
                        p.copy_(old)
                    elif self.fault == "tail":
                        p[-1] = old[-1]
                    elif self.fault == "sign":
                        p.copy_(2 * old - p)

    def good(fault: str) -> bool:
        made = lambda params, **options: Broken(params, fault, **options)  # noqa: E731
        made.__name__ = "Broken"
        cases = formulas.optimizer_cases(made, formulas.adamw, torch.device("cpu"), eps=formulas.EPS)
        return all(case.good for case in cases)

    assert good("none")
    assert not any(good(fault) for fault in ("no-op", "tail", "sign"))


def test_the_command_runs_as_a_program(at: Path) -> None:
    """Fault: the entry point needs what only the tests set up."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, "-m", "deepspeed_ops.ops_command", "which", OP]
    done = subprocess.run(
        argv, env=env, cwd=at, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert done.returncode == 0 and f"op {OP} on" in done.stdout, done.stderr


def test_exit_codes_are_those_of_the_classes() -> None:
    """Fault: scripts that cannot tell "wrong numbers" from a typing error."""
    assert LoadFailed.exit_code == 31 and UsageError.exit_code == 2
