"""Manifests: canonical text, strict reading, and the comparison with the file before each load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_builder.errors import CorruptPart
from op_builder.manifest import Manifest, file_sha256, read_manifest, write_manifest

HOST = Manifest(
    op="cpu_adam",
    variant="linux-x86_64",
    kind="host",
    filename="cpu_adam.so",
    key="ab" * 16,
    source_digest="cd" * 16,
    compiler="g++ 12.2.0",
    flags=("-O3", "-std=c++17"),
    user_flags=("-I/opt/a b",),
    abi="tvm-ffi 0.1",
    platform="linux-x86_64",
    glibc=(2, 17),
    simd=("avx512", "avx2", "scalar"),
    needed=("libtvm_ffi.so", "libc.so.6"),
    created_by="0.1.0",
)
pairs = st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(0, 99)))
words = st.lists(st.text(max_size=8), max_size=3).map(tuple)
manifests = st.builds(
    Manifest,
    op=st.text(max_size=9),
    variant=st.text(max_size=9),
    kind=st.sampled_from(["host", "device"]),
    filename=st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True),
    key=st.text(max_size=9),
    source_digest=st.text(max_size=9),
    compiler=st.text(max_size=9),
    compiler_release=pairs,
    flags=words,
    user_flags=words,
    glibc=pairs,
    ptx_isa=pairs,
    kernels=words,
    size=st.integers(0, 1 << 60),
)


@given(manifests)
def test_round_trip(manifest: Manifest) -> None:
    """Fault: a field changes its type (tuple to list) or is lost on the way through JSON."""
    assert Manifest.from_json(manifest.to_json()) == manifest


@given(manifests)
def test_canonical(manifest: Manifest) -> None:
    """Fault: equal parts get different manifests (export and import compare digest for digest)."""
    text = manifest.to_json()
    assert text.isascii() and text.endswith("}\n") and "\r" not in text
    assert Manifest.from_json(text).to_json() == text
    keys = list(json.loads(text))
    assert keys == sorted(keys)


def test_file_round_trip(tmp_path: Path) -> None:
    """Fault: Windows line ends or code pages in the file."""
    path = tmp_path / "cpu_adam.so.json"
    write_manifest(path, HOST)
    assert read_manifest(path) == HOST
    assert path.read_bytes() == HOST.to_json().encode()


def changed(**values: object) -> str:
    data = json.loads(HOST.to_json())
    data.update(values)
    return json.dumps({k: v for k, v in data.items() if v != "DROP"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        changed(format=2),
        changed(format=True),
        changed(format="DROP"),
        changed(op="DROP"),
        changed(surprise=1),
        changed(size="12"),
        changed(size=True),
        changed(size=1.0),
        changed(kind="gpu"),
        changed(glibc=[2]),
        changed(glibc=[2, "17"]),
        changed(flags="-O3"),
        changed(flags=[1]),
        changed(filename="../../etc/x"),
        changed(filename="a/b.so"),
        changed(filename="a\\b.so"),
        changed(filename=""),
        changed(filename=".."),
        changed(filename=None),
    ],
)
def test_anything_else_is_corrupt(text: str) -> None:
    """Fault: KeyError or TypeError far from the file; a part path that leaves its folder."""
    with pytest.raises(CorruptPart) as caught:
        Manifest.from_json(text, "x.json")
    assert "x.json" in caught.value.what and caught.value.why


@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    """Fault: UnicodeDecodeError for a damaged manifest."""
    with pytest.raises(CorruptPart):
        Manifest.from_json(data)


def test_unreadable_manifest(tmp_path: Path) -> None:
    """Fault: FileNotFoundError instead of an error that says what to do."""
    with pytest.raises(CorruptPart, match="cannot read"):
        read_manifest(tmp_path / "none.json")


def test_verify(tmp_path: Path) -> None:
    """Fault: a half-written library is loaded (SIGBUS), a foreign one of equal size too."""
    file = tmp_path / "cpu_adam.so"
    file.write_bytes(bytes(range(256)) * 100)
    manifest = HOST.with_file(file)
    assert (manifest.size, manifest.filename) == (25600, "cpu_adam.so") and manifest.sha256 == file_sha256(file)
    manifest.verify(file)
    file.write_bytes(bytes(range(256)) * 50)
    with pytest.raises(CorruptPart, match="expected 25600 bytes, found 12800"):
        manifest.verify(file)
    file.write_bytes(bytes(25600))
    with pytest.raises(CorruptPart, match="sha256"):
        manifest.verify(file)
    file.unlink()
    with pytest.raises(CorruptPart, match="cannot read"):
        manifest.verify(file)


def test_frozen() -> None:
    """Fault: a manifest changed after it was checked."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        HOST.size = 3  # type: ignore[misc]
