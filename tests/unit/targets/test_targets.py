"""GPU targets: the arch list as users write it, names that round-trip, and which device runs what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_builder.errors import ArchListError
from op_builder.matrix import load
from op_builder.targets import (
    Target,
    capability_of,
    cell_set,
    named_archs,
    nearest,
    parse_arch_list,
    ship_set,
    spellings,
    supported_by,
    why_not,
)

known_targets = st.builds(
    Target,
    st.integers(1, 12),
    st.integers(0, 9),
    st.sampled_from(["sass", "ptx"]),
    st.sampled_from(["", "a", "f"]),
)
capabilities = st.sampled_from(list(load().archs))


def variants(text: str | None, **more: object) -> list[str]:
    return [t.variant for t in parse_arch_list(text, **more)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0a", ["sm90a"]),
        ("12.0a+PTX", ["sm120a", "ptx120a"]),
        ("10.0f", ["sm100f"]),
        ("Ampere", ["sm80", "sm86", "ptx86"]),
        ("  8.0 ; 9.0 ", ["sm80", "sm90"]),
        ("8.6, 8.9", ["sm86", "sm89"]),
        ("7.5;6.1;12.0;8.0", ["sm61", "sm75", "sm80", "sm120"]),
        ("8.6+PTX", ["sm86", "ptx86"]),
        ("8.0;;9.0;", ["sm80", "sm90"]),
        ("8.0\t9.0\n", ["sm80", "sm90"]),
        ("9.0;9.0a;9.0", ["sm90", "sm90a"]),
        ("Ampere;8.6;8.9", ["sm80", "sm86", "ptx86", "sm89"]),
        ("Ampere+Tegra", ["sm87"]),
        ("Volta+Tegra", ["sm72"]),
        ("Maxwell", ["sm50", "sm52", "ptx52"]),
        ("Pascal", ["sm60", "sm61", "ptx61"]),
        ("Hopper", ["sm90", "ptx90"]),
        ("Blackwell", ["sm100", "sm103", "sm120", "sm121", "ptx121"]),
        ("Blackwell+Tegra", ["sm110"]),
    ],
)
def test_arch_list(text: str, expected: list[str]) -> None:
    """Fault: int('0a'), a list taken in the order written, blanks refused, names torch knows unknown here."""
    assert variants(text) == expected


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("sm_90", "9.0"),
        ("90", "9.0"),
        ("sm90a", "9.0a"),
        ("100f", "10.0f"),
        ("compute_75", "7.5+PTX"),
        ("8.6+ptx", "8.6+PTX"),
        ("8.6PTX", "8.6+PTX"),
        ("ampere", "Ampere"),
        ("Amper", "Ampere"),
        ("Turing+Tegra", "Turing"),
        ("Native", "native"),
        ("8.5", "8.6"),
        ("13.7", "12.1"),
    ],
)
def test_unknown_entry_names_the_nearest_spelling(entry: str, hint: str) -> None:
    """Fault: a bare ValueError or IndexError; a message without a way out."""
    with pytest.raises(ArchListError) as caught:
        parse_arch_list(f"8.0;{entry}")
    assert repr(entry) in caught.value.what
    assert f"use '{hint}'" in caught.value.fix
    assert nearest(entry) in spellings()


@pytest.mark.parametrize("text", [";", " ; , ", "8.0;9.0f", "3.5", "Kepler", "8.0a", "8.0+PTX+PTX", "²", "8.٦"])
def test_what_names_no_target_is_a_typed_error(text: str) -> None:
    """Fault: separators alone, dropped architectures, forms that do not exist or foreign digits pass or crash."""
    with pytest.raises(ArchListError) as caught:
        parse_arch_list(text)
    assert caught.value.fix and caught.value.why


@pytest.mark.parametrize("text", [None, "", "  ", "\t\n"])
def test_blank_asks_for_the_devices_here(text: str | None) -> None:
    """Fault: an empty variable on a machine without a GPU is an IndexError (max of nothing)."""
    assert parse_arch_list(text) == ()
    assert variants(text, native=[(9, 0), (8, 6), (9, 0)]) == ["sm86", "sm90"]


def test_native() -> None:
    """Fault: ``native`` without a GPU builds nothing, or crashes."""
    with pytest.raises(ArchListError, match="no GPU is visible"):
        parse_arch_list("native")
    assert variants("native;7.5", native=[(9, 0)]) == ["sm75", "sm90"]
    # A device newer than the matrix is still a target: a newer compiler can know it.
    assert variants("native", native=[(14, 2)]) == ["sm142"]


@given(st.text(max_size=12))
def test_any_text_gives_targets_or_our_error(text: str) -> None:
    """Fault: IndexError, KeyError, re.error or int() errors for odd input."""
    try:
        found = parse_arch_list(text)
    except ArchListError as error:
        assert error.what
    else:
        assert list(found) == sorted(set(found))


@given(st.lists(st.sampled_from([s for s in spellings() if s != "native" and not s.startswith(("3.", "Kepler"))])))
def test_order_and_repetition_do_not_matter(entries: list[str]) -> None:
    """Fault: the last entry wins, or the order decides which architecture gets PTX."""
    forward = parse_arch_list(";".join(entries))
    assert parse_arch_list(" ".join(reversed(entries))) == forward
    assert parse_arch_list(",".join(entries + entries)) == forward
    assert set(forward) == {t for e in entries for t in parse_arch_list(e)}


@given(known_targets)
def test_variant_names_round_trip(target: Target) -> None:
    """Fault: a part's name means another target than the one it was named after (sm100 read as 1.00)."""
    assert Target.from_variant(target.variant) == target
    assert capability_of(target.number) == target.capability


@pytest.mark.parametrize(
    "name", ["sm9", "sm", "sm_90", "ptx75x", "sm1000", "SM90", "sm90 ", "sm90b", "linux-x86_64", ""]
)
def test_other_names_are_no_variants(name: str) -> None:
    """Fault: a foreign file in a store is taken for a GPU part."""
    with pytest.raises(ArchListError):
        Target.from_variant(name)


@given(known_targets, known_targets)
def test_order_is_total_and_numeric(one: Target, other: Target) -> None:
    """Fault: sm100 sorted before sm90."""
    assert (one < other) + (other < one) + (one == other) == 1
    if one.capability < other.capability:
        assert one < other


def test_flags() -> None:
    """Fault: nvcc flags that compile for another target, or log lines that differ between compilers."""
    assert Target(8, 6).gencode == "-gencode=arch=compute_86,code=sm_86"
    assert Target(9, 0, "sass", "a").gencode == "-gencode=arch=compute_90a,code=sm_90a"
    assert Target(7, 5, "ptx").gencode == "-gencode=arch=compute_75,code=compute_75"
    assert Target(8, 6, "ptx").list_entry == "8.6+PTX"


# --- what runs where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "capability", "runs"),
    [
        ("sm80", (8, 0), True),
        ("sm80", (8, 6), True),
        ("sm86", (8, 9), True),
        ("sm86", (8, 0), False),
        ("sm80", (9, 0), False),
        ("sm90", (9, 0), True),
        ("sm90a", (9, 0), True),
        ("sm90a", (10, 0), False),
        ("sm100", (10, 3), True),
        ("sm100", (12, 0), False),
        ("sm100a", (10, 0), True),
        ("sm100a", (10, 3), False),
        ("sm100f", (10, 0), True),
        ("sm100f", (10, 3), True),
        ("sm103f", (10, 0), False),
        ("sm100f", (10, 1), False),
        ("sm100f", (12, 0), False),
        ("sm120f", (12, 1), True),
        ("sm120f", (13, 0), False),
        # systems-on-chip neither give nor take machine code
        ("sm86", (8, 7), False),
        ("sm80", (8, 7), False),
        ("sm87", (8, 7), True),
        ("sm87", (8, 9), False),
        ("sm70", (7, 2), False),
        ("sm72", (7, 5), False),
        ("sm100", (10, 1), False),
        ("sm101", (10, 3), False),
        ("sm101", (11, 0), False),
        ("sm110", (11, 0), True),
        # PTX
        ("ptx75", (7, 5), True),
        ("ptx75", (12, 1), True),
        ("ptx75", (7, 0), False),
        ("ptx75", (8, 7), True),
        ("ptx90a", (9, 0), True),
        ("ptx90a", (10, 0), False),
        ("ptx100f", (10, 3), True),
        ("ptx100f", (11, 0), False),
    ],
)
def test_what_runs_where(variant: str, capability: tuple[int, int], runs: bool) -> None:
    """Fault: "no kernel image" at launch, or a part that would run is passed over."""
    target = Target.from_variant(variant)
    assert target.runs_on(capability) is runs
    reason = why_not(target, capability)
    assert bool(reason) is not runs
    if reason:
        assert f"{capability[0]}.{capability[1]}" in reason or str(target.number) in reason


def test_an_unlisted_system_on_chip_takes_only_its_own() -> None:
    """Fault: a Tegra device that the matrix does not know is given desktop code."""
    assert Target(9, 0).runs_on((9, 3)) and not Target(9, 0).runs_on((9, 3), tegra=True)
    assert Target(9, 3).runs_on((9, 3), tegra=True)


@given(capabilities, capabilities)
def test_runs_on_is_consistent(part: tuple[int, int], device: tuple[int, int]) -> None:
    """Fault: a special form runs where the plain one does not, PTX below its level, code across majors."""
    plain = Target(*part)
    assert plain.runs_on(part)
    if Target(*part, "sass", "a").runs_on(device):
        assert part == device
    if Target(*part, "sass", "f").runs_on(device):
        assert plain.runs_on(device)
    if plain.runs_on(device):
        assert part[0] == device[0] and part <= device
    assert Target(*part, "ptx").runs_on(device) is (part <= device)


def test_ship_set_is_by_the_oldest_release_that_has_each() -> None:
    """Fault: a shipped part needs a newer driver than it must (525 is the floor wherever the architecture is older)."""
    shipped = dict(ship_set())
    oldest = next(iter(load().cuda))
    assert all(supported_by(t, r) for t, r in shipped.items())
    assert shipped[Target(9, 0)] == shipped[Target(6, 0)] == shipped[Target(7, 5, "ptx")] == oldest
    assert shipped[Target(10, 0)] == shipped[Target(12, 0)] == (12, 8)
    assert [t.variant for t in shipped] == [t.variant for t in sorted(shipped)]
    assert {t for t in shipped if t.kind == "ptx"} == {Target(7, 5, "ptx")}


def test_every_device_from_pascal_on_has_a_shipped_part() -> None:
    """Fault: a GPU of the list finds nothing in a wheel."""
    for capability, arch in load().archs.items():
        if capability >= (6, 0) and not arch.tegra:
            assert any(t.runs_on(capability) for t, _ in ship_set()), capability


def test_cell_set_holds_what_that_release_has() -> None:
    """Fault: an image asks its compiler for an architecture it does not have."""
    assert Target(7, 0) in cell_set((12, 1)) and Target(10, 0) not in cell_set((12, 1))
    assert Target(7, 0) not in cell_set((13, 0)) and Target(10, 0) in cell_set((13, 0))


def test_names_cover_torchs() -> None:
    """Fault: a name that torch's own list takes is refused."""
    assert set(named_archs()) >= {"Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"}


def test_forms_by_release() -> None:
    """Fault: the family form asked of a compiler that does not know it (12.8 has 100a but not 100f)."""
    assert supported_by(Target(10, 0, "sass", "a"), (12, 8)) and not supported_by(Target(10, 0, "sass", "f"), (12, 8))
    assert supported_by(Target(10, 0, "sass", "f"), (12, 9, 86)) and not supported_by(
        Target(9, 0, "sass", "f"), (13, 0)
    )
    assert not supported_by(Target(14, 2), (13, 0))
