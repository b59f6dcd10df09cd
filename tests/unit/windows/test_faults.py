"""The table of messages: every fault has three parts, a class of ours, an example, and its row in the documentation."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from op_builder import faults
from op_builder.commands import Problem
from op_builder.errors import OpsError
from op_builder.faults import CATALOGUE, Fault

ROOT = Path(__file__).resolve().parents[3]


def made_by() -> dict[str, object]:
    """The functions that make a problem, by name."""
    return {
        name: item
        for name, item in vars(faults).items()
        if inspect.isfunction(item) and not name.startswith("_") and item.__module__ == faults.__name__
    }


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda f: f.problem.what[:40])
def test_a_fault_says_what_why_and_fix(fault: Fault) -> None:
    """Fault: a message that leaves the user with a search engine."""
    found = fault.problem
    assert fault.reported and all(fault.reported)
    assert found.what and found.why and found.fix
    for banned in ("please", "may ", "hardware/software"):
        assert banned not in f"{found.what} {found.why} {found.fix}".lower()
    if fault.error is not None:
        raised = fault.error(found.what, found.why, found.fix)
        assert isinstance(raised, OpsError) and str(raised).splitlines()[0] == found.what
        assert raised.exit_code > 1


def test_every_fault_stands_in_the_catalogue() -> None:
    """Fault: a message that users meet and the table of the documentation does not know."""
    functions = made_by()
    assert len(functions) >= 18
    source = inspect.getsource(faults)
    listed = source[source.index("CATALOGUE:") :]
    assert not [name for name in functions if f"{name}(" not in listed]


def test_every_fault_is_raised_or_told_somewhere() -> None:
    """Fault: a row of the table whose message no code gives."""
    rooms = [p for folder in ("op_builder", "src") for p in (ROOT / folder).rglob("*.py") if p.name != "faults.py"]
    used = "\n".join(p.read_text(encoding="utf-8") for p in rooms)
    assert not [name for name in made_by() if f"{name}(" not in used]


def test_the_documentation_begins_with_what_most_users_need() -> None:
    """Fault: a page that begins with a toolchain, for readers who need none."""
    lines = (ROOT / "docs" / "windows.md").read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if line and not line.startswith("#"))
    assert first.startswith("Most users need nothing")
    text = "\n".join(lines)
    for word in (
        "| you have | do this |",
        "WSL2",
        "no administrator",
        "build_win.bat",
        "A mingw DLL is not the MSVC DLL",
    ):
        assert word in text


def test_problems_are_plain_values() -> None:
    """Fault: a fault that looks at the machine, and differs between the page and the message."""
    assert all(isinstance(f.problem, Problem) for f in CATALOGUE)
    assert faults.python_is_32_bit("windows-x86_64", (3, 14)) == faults.python_is_32_bit("windows-x86_64", (3, 14))
