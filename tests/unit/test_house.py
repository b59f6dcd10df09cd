"""The rules of the house (STYLE.md, "Rooms"), read from the syntax tree: who may import whom, who may look at the
machine, what sources must not contain. Each test guards one kind of fault that has bitten this field before."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from op_builder.spec import all_specs

ROOT = Path(__file__).resolve().parent.parent.parent
DECIDE = sorted((ROOT / "op_builder").rglob("*.py"))
SERVE = sorted((ROOT / "src" / "deepspeed_ops").rglob("*.py"))
FACE = sorted((ROOT / "src" / "deepspeed").rglob("*.py"))
SPECS = sorted(p for p in (ROOT / "op_builder" / "ops").glob("*.py") if p.name != "__init__.py")
NATIVE = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".cu", ".cuh", ".h"})
FACE_BUILDERS = "src/deepspeed/ops/op_builder"
LAZY = {"rich", "pynvml", "tvm_ffi"}
DECIDE_MAY = {"packaging", "filelock", "ninja", "tomli", *LAZY}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name(path))


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(top-level package, whether at module level, line); relative imports are ours and not listed."""
    lazy = {
        node
        for outer in ast.walk(tree(path))
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node not in lazy, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node not in lazy, node.lineno


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def foreign(top: str) -> bool:
    return top not in sys.stdlib_module_names and top != "__future__"


def dotted(node: ast.AST) -> str:
    """``os.environ.update`` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield dotted(node.func) or getattr(node.func, "attr", ""), node


# ---- rooms ------------------------------------------------------------------------------------------------------


def test_decide_imports_only_what_it_may() -> None:
    """Fault: the build room grows a dependency (torch, numpy), and building needs what only running should need."""
    bad = [f"{name(p)}:{n} {t}" for p in DECIDE for t, _, n in imports(p) if foreign(t) and t not in DECIDE_MAY]
    assert not bad


def test_decide_imports_slow_things_lazily() -> None:
    """Fault: importing the builders opens NVML, a terminal or the FFI runtime."""
    bad = [f"{name(p)}:{n} {t}" for p in DECIDE for t, top, n in imports(p) if t in LAZY and top]
    assert not bad


def test_only_the_loader_touches_the_ffi_runtime() -> None:
    """Fault: a second place loads libraries, and the load order of libtvm_ffi is decided twice."""
    bad = [f"{name(p)}:{n}" for p in DECIDE for t, _, n in imports(p) if t == "tvm_ffi" and p.stem != "loader"]
    assert not bad


def test_arrows_point_one_way() -> None:
    """Fault: the work imports its face, or the builders import the work: a cycle, and no room can be taken alone."""
    down = [f"{name(p)}:{n}" for p in SERVE for t, _, n in imports(p) if t == "deepspeed"]
    up = [f"{name(p)}:{n}" for p in DECIDE for t, _, n in imports(p) if t in ("deepspeed", "deepspeed_ops")]
    assert not down + up


def test_face_holds_no_dependency_of_its_own() -> None:
    """Fault: the face computes something; then its state exists twice."""
    bad = [f"{name(p)}:{n} {t}" for p in FACE for t, _, n in imports(p) if foreign(t) and not t.startswith("deepspeed")]
    assert not bad


def test_decide_does_not_print() -> None:
    """Fault: a probe writes into the user's output; logging and return values are what a caller can handle."""
    bad = [f"{name(p)}:{c.lineno}" for p in DECIDE for f, c in calls(p) if f in ("print", "sys.stdout.write")]
    assert not bad


def test_nobody_writes_the_environment() -> None:
    """Fault: one op's build narrows the arch list of every op after it. The one exception is the FFI import switch."""
    bad = []
    for path in [*DECIDE, *SERVE, *FACE]:
        for called, call in calls(path):
            if re.fullmatch(r"os\.(putenv|unsetenv|environ\.(update|setdefault|pop|clear|popitem))", called):
                bad.append(f"{name(path)}:{call.lineno}")
        for node in ast.walk(tree(path)):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for target in targets if isinstance(node, (ast.Assign, ast.Delete, ast.AugAssign)) else ():
                if isinstance(target, ast.Subscript) and dotted(target.value) == "os.environ":
                    bad.append(f"{name(path)}:{node.lineno}")
    assert not [b for b in bad if not b.startswith("op_builder/loader.py:")]
    assert len(bad) <= 3, "the loader sets and restores one variable; nothing more"


def test_processes_start_in_three_rooms_only() -> None:
    """Fault: a decision runs a program, so it cannot be tested on another machine and costs its user a fork."""
    starts = re.compile(
        r"subprocess\.(run|Popen|call|check_\w+|get\w+)|os\.(system|popen|exec\w*|spawn\w*)|multiprocessing\.\w+"
    )
    bad = [
        f"{name(p)}:{c.lineno} {f}"
        for p in DECIDE
        if p.stem not in ("host", "toolchain", "compile")
        for f, c in calls(p)
        if starts.fullmatch(f)
    ]
    assert not bad


def test_every_subprocess_states_its_terms() -> None:
    """Fault: a child waits for input, never ends, or its output kills the parent with a decoding error."""
    wanted = {"encoding", "errors", "timeout", "stdin"}
    bad = []
    for path in [*DECIDE, *SERVE]:
        for called, call in calls(path):
            given = {k.arg for k in call.keywords}
            if called == "subprocess.run" and not wanted <= given and None not in given:
                bad.append(f"{name(path)}:{call.lineno} lacks {sorted(wanted - given)}")
    assert not bad


def test_text_files_state_their_encoding() -> None:
    """Fault: on Windows the default encoding is not UTF-8, and a manifest written there is unreadable here."""
    bad = []
    for path in [*DECIDE, *SERVE, *FACE, ROOT / "setup.py", *sorted((ROOT / "ci").rglob("*.py"))]:
        for called, call in calls(path):
            last, given = called.rsplit(".", 1)[-1], {k.arg for k in call.keywords}
            mode = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            opens = called == "open" or (
                last == "open" and called[0].islower() and not called.startswith(("os.", "self.", "queue."))
            )
            text = last in ("read_text", "write_text") or (opens and not any("b" in m for m in mode))
            if text and "encoding" not in given and not any(a in ("utf-8", "ascii") for a in mode):
                bad.append(f"{name(path)}:{call.lineno} {called}")
    assert not bad


# ---- native sources ---------------------------------------------------------------------------------------------


@cache
def code(path: Path) -> str:
    """A C++ source without comments and with empty strings."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', text)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("ends the process", r"\b(exit|_exit|_Exit|quick_exit|abort|terminate|assert)\s*\("),
        (
            "writes to the user's terminal",
            r"\b(v?f?printf|puts|fputs|putchar|perror)\s*\(|std::(cout|cerr|clog)|iostream",
        ),
        ("launches through the CUDA runtime", r"<<<"),
        ("is compiled for this very CPU", r"march=native"),
    ],
)
def test_native_sources_do_not(kind: str, pattern: str) -> None:
    """Fault: an op takes the whole process with it, speaks where nobody asked, or links the CUDA runtime."""
    hits = [(p, m) for p in NATIVE for m in re.finditer(pattern, code(p))]
    assert not [f"{name(p)}:{code(p)[: m.start()].count(chr(10)) + 1} {kind}: {m[0]}" for p, m in hits]


def test_native_sources_include_no_torch_python_or_cuda() -> None:
    """Fault: the binary grows an axis (torch, Python or CUDA release) and has to be built once per value of it."""
    banned = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|Python\.h|pybind|cuda|nv|cub/|cutlass|cooperative_groups)')
    text = {p: p.read_text(encoding="utf-8") for p in NATIVE}
    assert not [f"{name(p)} {m[0]}" for p in NATIVE for m in banned.finditer(text[p])]


def test_device_code_includes_only_our_own_headers() -> None:
    """Fault: NVRTC has no <cstdint>, and CUDA's own headers lie elsewhere in every wheel."""
    files = [p for p in NATIVE if p.suffix in (".cu", ".cuh")]
    assert not [
        f"{name(p)} {m[0]}" for p in files for m in re.finditer(r"#\s*include\s*<[^>]*>", p.read_text(encoding="utf-8"))
    ]


def test_no_flags_that_bind_to_this_machine() -> None:
    """Fault: SIGILL on the next machine (-march=native), wrong digits (fast math)."""
    banned = re.compile(r"-march=native|-mcpu=native|use_fast_math|-ffast-math|/fp:fast")
    bad = [
        f"{name(p)}:{n.lineno} {n.value}"
        for p in DECIDE
        for n in ast.walk(tree(p))
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and banned.fullmatch(n.value)
    ]
    assert not bad


# ---- specs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_a_spec_is_one_literal(path: Path) -> None:
    """Fault: a spec that computes: then what an op is depends on where one looks at it."""
    body = [n for n in tree(path).body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    assert len(body) == 1, "one assignment and a docstring, nothing else"
    assert isinstance(body[0], (ast.Assign, ast.AnnAssign))
    assert body[0].value is not None
    literal = ast.literal_eval(body[0].value)
    assert json.loads(json.dumps(literal)) == literal
    assert literal["name"] == path.stem


@pytest.mark.parametrize("op", sorted(all_specs()))
def test_an_op_is_complete(op: str) -> None:
    """Fault: an op without a source folder, a test or a line in the documentation."""
    spec = all_specs()[op]
    missing = [s for s in (*spec.host, *spec.device) if not (ROOT / "csrc" / s).is_file()]
    assert not missing
    assert (ROOT / "csrc" / op).is_dir() is not spec.python_only
    assert list((ROOT / "tests").rglob(f"test_{op}*.py")), f"tests/ops/test_{op}.py"
    assert f"## {op}" in (ROOT / "docs" / "ops.md").read_text(encoding="utf-8"), "run: make gen"


# ---- files ------------------------------------------------------------------------------------------------------


@cache
def tracked() -> tuple[tuple[str, Path], ...]:
    """(mode, path) of what git tracks and what it would take in."""
    if not (ROOT / ".git").exists():
        pytest.skip("no .git here: what is tracked cannot be listed")
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-s", "-z"],
        cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True,
        stdin=subprocess.DEVNULL,
    ).stdout  # fmt: skip
    rows = [line.split("\t", 1) for line in listing.split("\0") if line]
    return tuple((meta.split()[0], ROOT / path) for meta, path in rows if (ROOT / path).is_file())


def test_no_links_no_binaries_nothing_big() -> None:
    """Fault: links become text files on Windows; a binary cannot be reviewed; a big file stays in history for ever."""
    bad = [f"{name(p)}: a link" for mode, p in tracked() if mode == "120000" or p.is_symlink()]
    bad += [f"{name(p)}: over 1 MB" for _, p in tracked() if p.stat().st_size > 1_000_000]
    bad += [f"{name(p)}: binary" for _, p in tracked() if b"\0" in p.read_bytes() and p.suffix != ".png"]
    assert not bad


def test_no_machine_paths_and_no_registry_hosts() -> None:
    """Fault: a file that only works, or only says something true, on its author's machine."""
    home, host = "|".join(("root", "work", "home/[a-z]+")), "|".join(("pypi", "pythonhosted", "npmjs", "debian"))
    banned = re.compile(rf"(?<![\w.])/({home})/\w|\b({host})\.(org|com|net)\b|\bfiles\.python")
    bad = []
    for _, path in tracked():
        if path.name != "LICENSE" and path.suffix != ".png":
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                bad += [f"{name(path)}:{number} {m[0]}" for m in banned.finditer(line)]
    assert not bad


def test_names_say_what_is_inside() -> None:
    """Fault: a room where everything is put that has no name."""
    banned = {"utils", "util", "misc", "helpers", "helper", "common2", "stuff"}
    # DeepSpeed calls an op "utils"; its name is an interface.
    called = {f"op_builder/ops/{op}.py" for op in all_specs()} | {f"{FACE_BUILDERS}/{op}.py" for op in all_specs()}
    paths = [p for _, p in tracked() if name(p) not in called]
    assert not [name(p) for p in paths if banned & {part.split(".")[0] for part in p.relative_to(ROOT).parts}]


def test_length_of_files_and_functions() -> None:
    """Fault: one room that is two. Longer ones say why: a comment `# long: <reason>` on the def or the first lines."""
    bad = []
    for _, path in tracked():
        limit = {".py": 400, ".cpp": 600, ".cu": 600, ".cuh": 600, ".h": 600}.get(path.suffix)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if limit and len(lines) > limit and not any("long:" in line for line in lines[:12]):
            bad.append(f"{name(path)}: {len(lines)} lines")
    for path in [*DECIDE, *SERVE, *FACE]:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                span = body_lines(node)
                if span > 40 and "long:" not in " ".join(lines[node.lineno - 2 : node.body[0].lineno]):
                    bad.append(f"{name(path)}:{node.lineno} {node.name}: {span} lines")
    assert not bad


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    skipped = (first.end_lineno or 0) - first.lineno + 1 if doc else 0
    return (node.end_lineno or 0) - node.lineno + 1 - skipped


def test_nothing_unfinished() -> None:
    """Fault: a stub that a caller takes for the real thing."""
    banned = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error", "XX" + "X")) + r")\b")
    files = [p for _, p in tracked() if p.suffix in {".py", ".cpp", ".cu", ".cuh", ".h", ".sh"}]
    assert not [f"{name(p)} {m[0]}" for p in files for m in banned.finditer(p.read_text(encoding="utf-8"))]


def test_versions_and_archs_live_in_the_matrix_only() -> None:
    """Fault: a list of archs or releases that nobody remembers to change when the matrix changes."""
    listed = re.compile(
        r"\b\d{1,2}\.\d\b\s*[;,]\s*\b\d{1,2}\.\d\b|\b(sm|compute)_?\d{2,3}\b|\bcu1[1-9]\d\b|==\s*\d+\.\d"
    )
    bad = []
    for folder in ("ci", "recipe", "docker"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.name != "matrix.toml" and path.suffix != ".pyc":
                text = path.read_text(encoding="utf-8", errors="replace")
                text = re.sub(r"# Generated by: [^\n]*\n.*?# end\n", "", text, flags=re.DOTALL)
                if not text.startswith("# Generated"):
                    bad += [f"{name(path)} {m[0]}" for m in listed.finditer(text)]
    assert not bad


def load(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_equal_their_generators() -> None:
    """Fault: someone edits a generated file, and the next `make gen` takes the edit away."""
    stale = load(ROOT / "ci" / "gen.py").stale()  # type: ignore[attr-defined]
    assert not stale, f"run: make gen   ({', '.join(stale)})"


def test_tests_skip_with_a_reason() -> None:
    """Fault: a skip that hides a failure: it must name what is missing."""
    bad = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for called, call in calls(path):
            given = {k.arg for k in call.keywords}
            if called.endswith("mark.skip") and "reason" not in given and not call.args:
                bad.append(f"{name(path)}:{call.lineno}")
            if called.endswith("mark.skipif") and "reason" not in given:
                bad.append(f"{name(path)}:{call.lineno}")
            if called == "pytest.skip" and not (call.args or given):
                bad.append(f"{name(path)}:{call.lineno}")
    assert not bad


def test_the_scanners_see_what_they_look_for(tmp_path: Path) -> None:
    """Fault: a rule that cannot fail. Each scanner is shown one offender."""
    source = tmp_path / "offender.py"
    source.write_text("import torch\ndef f():\n    import rich\n    subprocess.run([])\n", encoding="utf-8")
    parsed = ast.parse(source.read_text(encoding="utf-8"))
    assert [n.names[0].name for n in ast.walk(parsed) if isinstance(n, ast.Import)] == ["torch", "rich"]
    native = tmp_path / "offender.cpp"
    native.write_text('// abort();\nchar* s = "exit(1)";\nvoid g() { abort(); }\n', encoding="utf-8")
    assert len(re.findall(r"\b(exit|abort)\s*\(", code(native))) == 1
