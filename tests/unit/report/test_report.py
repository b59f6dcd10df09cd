"""``ds_report``: pure rendering, honest exit codes, and a broken torch that is a line instead of a crash."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from deepspeed_ops import report, report_data
from deepspeed_ops.report_data import OpLine, Report, TorchFacts, Way


def made(**changes: Any) -> Report:
    """A report of an invented machine."""
    facts: dict[str, Any] = {
        "version": "0.1.0+abc1234",
        "git_hash": "abc1234",
        "git_branch": "main",
        "path": ("site-packages/deepspeed",),
        "compiled_with": "g++ 12.2.0, nvrtc 12.1 (sm75 sm86)",
        "python": "3.11.7 (python)",
        "host": {
            "platform": "linux-x86_64",
            "libc": "glibc 2.36",
            "cpu_features": ["avx2", "fma"],
            "driver": {"version": "580.1", "cuda": "13.0"},
            "gpus": [{"ordinal": 0, "name": "H200", "capability": "9.0", "memory_bytes": 141 << 30, "uuid": "GPU-1"}],
            "notes": ["a note"],
        },
        "tools": {
            "host": {"kind": "gcc", "version": "12.2.0", "path": "bin/g++"},
            "ninja": "bin/ninja",
            "nvcc": [{"version": "13.0", "path": "bin/nvcc"}],
            "nvrtc": [{"version": "13.0", "path": "libnvrtc.so", "source": "torch"}],
            "ffi": {"version": "0.1.15"},
            "problems": [],
        },
        "torch": TorchFacts("2.13.0", ("site-packages/torch",), "13.0", None),
        "shm_bytes": 8 << 30,
        "ops": (
            OpLine(
                "cpu_adam", True, True, (Way("host library", "load", "load a.so (exact)", ("b.so: glibc: too old",)),)
            ),
            OpLine("fused_adam", False, False, (Way("GPU 0", "fail", "no part fits", (), "pip install nvrtc"),)),
        ),
        "problems": ("something to act on",),
        "skipped": {"other": "no compiler"},
    }
    return Report(**{**facts, **changes})


def text(shown: Report, **options: Any) -> str:
    out = io.StringIO()
    report.write(report.lines(shown, **options), out, colour=False)
    return out.getvalue()


ROWS = (
    *("torch install path", "torch version", "deepspeed install path", "deepspeed info", "torch cuda version"),
    *("torch hip version", "nvcc version", "deepspeed wheel compiled w.", "shared memory (/dev/shm) size"),
)


def test_headings_and_rows_are_deepspeeds() -> None:
    """Fault: a script that greps ds_report finds nothing any more."""
    shown = text(made())
    for heading in (
        "DeepSpeed C++/CUDA extension op report",
        "op name ................ installed .. compatible",
        "DeepSpeed general environment info:",
        "ninja .................. [OKAY]",
    ):
        assert heading in shown.splitlines()
    for name in ROWS:
        assert f"{name} {'.' * (33 - len(name))} " in shown
    assert "cpu_adam ............... [YES] ...... [OKAY]" in shown
    assert "fused_adam ............. [NO] ....... [NO]" in shown
    assert "deepspeed info ................... 0.1.0+abc1234, abc1234, main" in shown


def test_reasons_are_shown_and_can_be_hidden() -> None:
    """Fault: "not compatible" without a reason; or reasons that cannot be switched off."""
    shown = text(made())
    for reason in ("glibc: too old", "fix: pip install nvrtc", "something to act on", "other: no compiler"):
        assert reason in shown
    quiet = text(made(), quiet=True)
    assert not any(r in quiet for r in ("glibc: too old", "something to act on", "a note", "left out"))
    hidden = text(made(), hide_operators=True)
    assert "op name" not in hidden and "torch version" in hidden


def test_no_escape_codes_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: colour codes in a log file; NO_COLOR and dumb terminals ignored."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert "\x1b" not in text(made())
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    assert report.wants_colour(Terminal()) and not report.wants_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not report.wants_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not report.wants_colour(Terminal())


def test_colour_changes_no_word() -> None:
    """Fault: the terminal shows another report than the pipe (wrapped or highlighted lines)."""
    import re

    out = io.StringIO()
    report.write(report.lines(made()), out, colour=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert [line.rstrip() for line in bare.splitlines()] == text(made()).splitlines()


@pytest.mark.parametrize(
    ("code", "out", "err", "said"),
    [
        (1, "", "Traceback\nImportError: libcudart.so.12: cannot open\n", "libcudart.so.12"),
        (-11, "", "", "signal 11"),
        (0, "garbage\n", "", "garbage"),
    ],
)
def test_a_broken_torch_is_a_line(code: int, out: str, err: str, said: str) -> None:
    """Fault: the report dies of the very thing it should show."""
    facts = report_data.torch_facts(code, out, err)
    assert facts.version is None and said in facts.problem
    assert f"[FAIL] torch {facts.problem}" in text(made(torch=facts))


def test_torch_answers_through_its_own_noise() -> None:
    """Fault: a warning that torch prints first is taken for the answer."""
    facts = report_data.torch_facts(0, 'noise\n\n["2.4.0", ["p"], "12.1", null]\n', "warning")
    assert facts == TorchFacts("2.4.0", ("p",), "12.1", None)


def test_json_holds_everything_and_reads_back() -> None:
    """Fault: a value that JSON cannot hold, found by the first user who asks for --json."""
    data = json.loads(json.dumps(made().as_dict()))
    assert data["schema"] == report_data.SCHEMA
    assert data["ops"][0]["ways"][0]["why_not"] == ["b.so: glibc: too old"]
    assert data["torch"]["version"] == "2.13.0"


def test_check_names_what_cannot_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: exit 0 although something asked for is broken; non-zero although nobody asked."""
    monkeypatch.setattr(report, "gather", made)
    assert report.main([]) == 0
    assert report.main(["--check", "cpu_adam"]) == 0
    assert report.main(["--check"]) != 0
    assert "fused_adam cannot work here" in capsys.readouterr().err
    lonely = made(ops=(OpLine("fused_adam", False, False, (Way("host library", "build", "g++"),), "no GPU"),))
    monkeypatch.setattr(report, "gather", lambda: lonely)
    assert report.main(["--check"]) == 0, "a machine without a GPU is not broken"
    assert report.main(["--check", "fused_adam"]) != 0
    assert report.main(["--check", "cpu_adm"]) != 0
    assert "cpu_adm" in capsys.readouterr().err


def test_small_shared_memory_is_said_with_its_cure() -> None:
    """Fault: a container's 64 MB of /dev/shm kill the data loader with a bus error nobody explains."""
    assert "--shm-size" in text(made(shm_bytes=64 << 20))
    assert "--shm-size" not in text(made())
    assert "no /dev/shm" in text(made(shm_bytes=None))


def test_no_tools_no_gpu_no_driver() -> None:
    """Fault: the report needs what it should report as missing."""
    bare = made(
        host={**made().host, "driver": None, "gpus": [], "notes": []},
        tools={**made().tools, "host": None, "ninja": None, "nvcc": [], "nvrtc": [], "ffi": None},
        ops=(),
    )
    shown = text(bare)
    assert "ninja .................. [FAIL]" in shown
    assert "pip install apache-tvm-ffi" in shown


def test_compiled_with_lists_compilers_and_archs() -> None:
    """Fault: archs in alphabetical order (sm100 before sm75), or a torch release where none was compiled against."""
    from op_builder.manifest import Manifest

    def part(kind: Any, variant: str, compiler: str) -> Manifest:
        return Manifest("x", variant, kind, "f", "k", "d", compiler)

    built = [part("host", "linux-x86_64", "g++ 12.2.0"), *(part("device", f"sm{n}", "nvrtc 12.1") for n in (100, 75))]
    assert report_data.compiled_with(built) == "g++ 12.2.0, nvrtc 12.1 (sm75 sm100)"
    assert "no parts" in report_data.compiled_with([])


def test_a_bad_setting_is_a_warning_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: DS_BUILD_CPU_ADM=1 in the environment makes ds_report itself fail."""
    monkeypatch.setattr(report_data, "_start_torch", lambda env: "not asked")
    shown = report_data.gather({"DS_BUILD_CPU_ADM": "1", "PATH": "", "HOME": "."})
    assert any("DS_BUILD_CPU_ADM" in p and "DS_BUILD_CPU_ADAM" in p for p in shown.problems)
    assert not any(line.compatible for line in shown.ops)
