"""``ci/matrix.toml``: unknown or contradictory entries are errors, never silent defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from op_builder import matrix
from op_builder.errors import MatrixError
from op_builder.matrix import Range, dotted, load, parse, parse_version

TEXT = matrix.PATH.read_text(encoding="utf-8")


def test_the_file_of_this_checkout_loads_once() -> None:
    """Fault: the file is read again on every call, or from the current folder."""
    assert load() is load()
    assert matrix.PATH.is_absolute()


def test_every_release_has_what_a_build_needs() -> None:
    """Fault: a release added without driver, PTX version or compiler package."""
    for release, row in load().cuda.items():
        assert row.driver and row.ptx_isa == load().ptx_isa(release)
        assert re.fullmatch(r"nvidia-cuda-nvrtc(-cu\d+)?==" + re.escape(dotted(release)) + r"\.\d+", row.nvrtc)
        assert load().targets_of(release)


def test_numeric_order_not_alphabetical() -> None:
    """Fault: "10.0" sorted before "9.0" (the oldest and the newest release decide what ships)."""
    tables = load()
    assert list(tables.archs) == sorted(tables.archs)
    assert list(tables.archs)[-1] > (9, 0)
    assert list(tables.cuda) == sorted(tables.cuda)


def test_minor_version_of_cuda_13_dropped_the_old_architectures() -> None:
    """Fault: arch defaults that the compiler refuses (DeepSpeed on CUDA 13: 6.0;6.1;7.0)."""
    assert min(load().targets_of((13, 0))) == (7, 5)
    assert min(load().targets_of((12, 1))) == (5, 0)
    assert (10, 1) not in load().targets_of((13, 0)) and (11, 0) in load().targets_of((13, 0))
    assert (10, 1) in load().targets_of((12, 8)) and (11, 0) not in load().targets_of((12, 9))


def test_driver_floors() -> None:
    """Fault: a part offered to a driver that cannot load it."""
    floor = load().driver_floor
    assert floor((12, 1)) == (525,) and floor((13, 0)) == (580,)
    assert floor((12, 8), (10, 0)) == floor((12, 8), (12, 0)) == (570,)
    assert floor((12, 8), (9, 0)) == (525,)
    assert floor((14, 0)) > (580,), "an unknown major needs more than every known one"


def test_ptx_of_unlisted_release_is_the_safe_side() -> None:
    """Fault: a driver newer than the table is told to read newer PTX than it does, or crashes the lookup."""
    newest = max(load().ptx)
    assert load().ptx_isa((99, 0)) == load().ptx[newest]
    assert load().ptx_isa((12, 7)) == load().ptx[(12, 6)]
    with pytest.raises(MatrixError, match="no PTX version"):
        load().ptx_isa((10, 2))


@pytest.mark.parametrize(
    ("ask", "word"),
    [
        (lambda: load().arch((13, 7)), "13.7"),
        (lambda: load().release((11, 8)), "11.8"),
        (lambda: load().platform("beos-m68k"), "beos"),
        (lambda: load().oldest_release((3, 5)), "3.5"),
        (lambda: load().oldest_release((9, 0), "f"), "9.0f"),
        (lambda: parse_version("12.x"), "12.x"),
        (lambda: parse_version(""), "''"),
    ],
)
def test_unknown_is_an_error_with_three_parts(ask: object, word: str) -> None:
    """Fault: an unknown architecture, release or platform becomes a default."""
    with pytest.raises(MatrixError) as caught:
        ask()  # type: ignore[operator]
    assert word in caught.value.what and caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "Ada"', 'nam = "Ada"', "unknown keys"),
        ("schema = 1", "schema = = 1", "not TOML"),
        ("[driver]", "[drivers]", "driver"),
        ('"13.0" = "9.0"', "", "not complete"),
        ('now = "11.0"', 'now = "99.0"', "99.0"),
        ('torch = ["2.8"]', 'torch = ["2.99"]', "2.99"),
        ('f = "12.9", family = "101"', 'f = "12.9"', "family"),
        ('gcc = ["9", ""]', 'gcc = ["9"]', "not complete"),
    ],
)
def test_a_broken_file_is_named(old: str, new: str, says: str) -> None:
    """Fault: a slip in the one list shows up later as a KeyError in some other room."""
    assert old in TEXT
    with pytest.raises(MatrixError) as caught:
        parse(TEXT.replace(old, new, 1))
    assert says in str(caught.value)


def test_a_new_architecture_is_one_line() -> None:
    """Fault: adding a GPU architecture needs edits in several places."""
    from op_builder.targets import Target, parse_arch_list, ship_set

    line = '"13.0" = { name = "Next", listed = true, first = "13.5", ship = true }\n'
    tables = parse(TEXT.replace("[ship]", f"{line}\n[ship]"))
    assert parse_arch_list("Next", known=tables) == (Target(13, 0), Target(13, 0, "ptx"))
    assert (Target(13, 0), (13, 5)) in ship_set(tables)


def test_missing_file_is_a_matrix_error(tmp_path: Path) -> None:
    """Fault: an incomplete installation ends in FileNotFoundError."""
    with pytest.raises(MatrixError, match="cannot read"):
        load(tmp_path / "matrix.toml")


def test_ranges() -> None:
    """Fault: the upper end taken as included."""
    assert Range((9,), None).holds((12, 2)) and not Range((9,), None).holds((8, 5))
    assert Range((6,), (13,)).holds((12, 4)) and not Range((6,), (13,)).holds((13, 0))
    assert str(Range((6,), (13,))) == ">=6,<13" and str(Range((9,), None)) == ">=9"


def test_tegra_and_family_of_unknown_devices() -> None:
    """Fault: a device newer than the table crashes planning."""
    assert not load().is_tegra((99, 0)) and load().family((99, 0)) == ""
    assert {c for c in load().archs if load().is_tegra(c)} >= {(7, 2), (8, 7), (10, 1), (11, 0)}
