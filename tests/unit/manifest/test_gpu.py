"""The architecture read back from finished GPU parts of seven compiler releases (``gpu_images.json``)."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_builder.errors import CorruptPart
from op_builder.manifest import facts_as_fields, read_cubin, read_elf, read_gpu, read_ptx
from op_builder.matrix import load, parse_version

TEXT = (Path(__file__).parent / "gpu_images.json").read_text(encoding="utf-8")
IMAGES = {k: zlib.decompress(base64.b64decode(v)) for k, v in json.loads(TEXT)["images"].items()}
CUBINS = [k for k in IMAGES if " sm" in k]
PTX = [k for k in IMAGES if " ptx" in k]


@pytest.mark.parametrize("key", CUBINS)
def test_cubin_of_every_release(key: str) -> None:
    """Fault: the name believed instead of the file; CUDA 13's flags read with CUDA 12's layout; `a` or `f` lost."""
    release, variant = key.split()
    facts = read_cubin(IMAGES[key])
    assert facts.target.variant == variant
    assert facts.kernels == ("first", "second") and facts.isa is None
    assert facts.release in (None, parse_version(release))
    assert facts_as_fields(facts)["variant"] == variant


@pytest.mark.parametrize("key", PTX)
def test_ptx_of_every_release(key: str) -> None:
    """Fault: PTX newer than the driver shipped unnoticed; kernels of a comment counted."""
    release, variant = key.split()
    facts = read_gpu(IMAGES[key])
    assert facts.target.variant == variant and facts.kernels == ("first", "second")
    assert facts.isa == load().ptx_isa(parse_version(release))


def test_every_release_of_the_matrix_is_covered() -> None:
    """Fault: a release is added whose cubins nobody has read (its layout can differ)."""
    assert {parse_version(k.split()[0]) for k in IMAGES} == set(load().cuda)


def test_a_patched_header_is_noticed() -> None:
    """Fault: header and assembler's note disagree and one is believed."""
    data = bytearray(IMAGES["13.0 sm90"])
    (flags,) = struct.unpack_from("<I", data, 48)
    struct.pack_into("<I", data, 48, flags & ~0xFF00 | 80 << 8)
    with pytest.raises(CorruptPart, match="sm_80"):
        read_cubin(bytes(data))


def test_an_unknown_layout_is_refused() -> None:
    """Fault: a later ELF ABI is read with today's layout and gives a wrong architecture."""
    data = bytearray(IMAGES["13.0 sm90"])
    data[8] = 9
    with pytest.raises(CorruptPart, match="ABI version 9"):
        read_cubin(bytes(data))


def test_kinds_are_not_mixed_up() -> None:
    """Fault: a host library or text taken for GPU code, a cubin for a host library."""
    host = bytearray(IMAGES["12.1 sm90"])
    struct.pack_into("<H", host, 18, 62)
    with pytest.raises(CorruptPart, match="machine 62"):
        read_cubin(bytes(host))
    with pytest.raises(CorruptPart, match="GPU code"):
        read_elf(IMAGES["12.1 sm90"])
    with pytest.raises(CorruptPart, match="version"):
        read_gpu(b"not a part")


@pytest.mark.parametrize("key", ["12.1 sm90a", "13.0 sm100f", "12.8 sm100"])
def test_every_cut_is_noticed(key: str) -> None:
    """Fault: a half-written cubin passes because its header is whole."""
    data = IMAGES[key]
    # Headers of sections and programs stand at the end of these files: any cut takes some of them.
    for size in [*range(0, len(data) - 1, 97), len(data) // 2, len(data) - 1]:
        with pytest.raises(CorruptPart):
            read_cubin(data[:size])


@pytest.mark.parametrize("key", ["12.1 ptx75", "13.0 ptx100f"])
def test_cut_ptx_is_noticed(key: str) -> None:
    """Fault: PTX cut in the middle of a kernel is handed to the driver."""
    text = IMAGES[key]
    inside = text.index(b"{") + 5
    for size in (0, 10, inside, text.rindex(b"{") + 9):
        with pytest.raises(CorruptPart):
            read_ptx(text[:size])


def test_ptx_details() -> None:
    """Fault: options after the target, comments, strings with braces or a final zero confuse the reader."""
    text = (
        "// .version 1.0\n.version 8.1\n.target sm_75, debug\n.address_size 64\n/* .entry none { */\n"
        '.file 1 "a{b.cu"\n.visible .entry one(\n)\n{ ret; }\n.weak .entry two() { ret; }\n.func three() { ret; }\n'
    )
    facts = read_ptx(text.encode() + b"\0")
    assert (facts.target.variant, facts.isa, facts.kernels) == ("ptx75", (8, 1), ("one", "two"))
    for broken in (text.replace(".target", ".targe"), text.replace("sm_75", "sm_000"), ""):
        with pytest.raises(CorruptPart):
            read_ptx(broken)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_corrupt_or_read(data: bytes) -> None:
    """Fault: struct.error, IndexError or an endless loop on garbage."""
    for head in (b"", b"\x7fELF\x02\x01\x01\x33\x07"):
        try:
            read_gpu(head + data)
        except CorruptPart as error:
            assert error.what and error.why


@settings(max_examples=200)
@given(st.sampled_from(["12.1 sm90a", "13.0 sm100f"]), st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255))))
def test_flipped_bytes_are_corrupt_or_read(key: str, changes: list[tuple[int, int]]) -> None:
    """Fault: one flipped byte in a header ends in another exception, or takes minutes."""
    data = bytearray(IMAGES[key])
    for place, value in changes:
        data[place % len(data)] = value
    try:
        facts = read_cubin(bytes(data))
    except CorruptPart:
        return
    assert facts.target.kind == "sass"
