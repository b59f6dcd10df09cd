"""Version and wheel name rules, on invented trees and libraries: no build happens here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ops import version, wheel
from op_builder.manifest import ElfFacts, Manifest, write_manifest


def tree(root: Path, *, git: str | None = "ref: refs/heads/main", build_txt: str | None = None) -> Path:
    """A checkout of release 1.2.3."""
    (root / "version.txt").write_text("1.2.3\n", encoding="utf-8")
    if build_txt is not None:
        (root / "build.txt").write_text(build_txt, encoding="utf-8")
    if git is not None:
        (root / ".git" / "refs" / "heads").mkdir(parents=True)
        (root / ".git" / "HEAD").write_text(git + "\n", encoding="utf-8")
        (root / ".git" / "refs" / "heads" / "main").write_text("abcdef0123456789\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("env", "build_txt", "git", "wanted"),
    [
        ({}, None, True, "1.2.3+abcdef0"),
        ({"DS_BUILD_STRING": "+cu121"}, None, True, "1.2.3+cu121"),
        ({"DS_BUILD_STRING": "+cu121"}, ".dev4", True, "1.2.3+cu121"),
        ({"DS_BUILD_STRING": " "}, None, True, "1.2.3"),
        ({"DS_BUILD_STRING": ""}, None, True, "1.2.3+abcdef0"),
        ({}, ".dev4", True, "1.2.3.dev4"),
        ({}, " ", True, "1.2.3"),
        ({}, None, False, "1.2.3+unknown"),
    ],
)
def test_version(tmp_path: Path, env: dict[str, str], build_txt: str | None, git: bool, wanted: str) -> None:
    """Fault: a release built as "+hash", or a blank that is taken for "unset"."""
    root = tree(tmp_path, git="ref: refs/heads/main" if git else None, build_txt=build_txt)
    assert version.of_tree(root, env).version == wanted


def test_an_sdist_keeps_its_version(tmp_path: Path) -> None:
    """Fault: the wheel made from an sdist has another version than the sdist, or another project's git hash."""
    outer = tree(tmp_path)
    root = outer / "unpacked"
    root.mkdir()
    tree(root, git=None)
    wheel.write_version(root / "src", version.Version("1.2.3+feed123", "feed123", "release"))
    assert version.of_tree(root, {}) == version.Version("1.2.3+feed123", "feed123", "release")
    assert version.of_tree(root, {"DS_BUILD_STRING": " "}).version == "1.2.3"


def test_build_string_is_saved(tmp_path: Path) -> None:
    """Fault: metadata and wheel of one build get two versions: a frontend drops the variable between."""
    root = tree(tmp_path)
    version.save_build_string(root, {"DS_BUILD_STRING": ""})
    assert not (root / "build.txt").exists()
    version.save_build_string(root, {"DS_BUILD_STRING": "+x1"})
    assert version.of_tree(root, {}).version == "1.2.3+x1"


def test_a_suffix_no_installer_takes_is_refused(tmp_path: Path) -> None:
    """Fault: setuptools normalises nonsense silently, and the wheel's name is a surprise."""
    with pytest.raises(ValueError, match="DS_BUILD_STRING"):
        version.of_tree(tree(tmp_path), {"DS_BUILD_STRING": "_my build"})


def test_git_without_running_git(tmp_path: Path) -> None:
    """Fault: "dubious ownership" in a container, or no git there at all, makes the version "unknown"."""
    assert version.git_state(tree(tmp_path / "a" if (tmp_path / "a").mkdir() is None else tmp_path)) == (
        "abcdef0",
        "main",
    )
    packed = tmp_path / "packed"
    packed.mkdir()
    tree(packed)
    (packed / ".git" / "refs" / "heads" / "main").unlink()
    (packed / ".git" / "packed-refs").write_text("# pack-refs\n1234567890 refs/heads/main\n", encoding="utf-8")
    assert version.git_state(packed) == ("1234567", "main")
    detached = tmp_path / "detached"
    detached.mkdir()
    assert version.git_state(tree(detached, git="fedcba9876543210")) == ("fedcba9", "HEAD")
    worktree = tmp_path / "worktree"
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {packed / '.git'}\n", encoding="utf-8")
    assert version.git_state(worktree) == ("1234567", "main")
    assert version.git_state(tmp_path / "nowhere") == ("unknown", "unknown")


def elf(*symbols: str, needed: tuple[str, ...] = ("libc.so.6", "libstdc++.so.6", "libtvm_ffi.so")) -> ElfFacts:
    """A library that asks for these symbol versions."""
    return ElfFacts("x86_64", "", needed, (), tuple(("some.so", s) for s in symbols), ())


@pytest.mark.parametrize(
    ("library", "wanted"),
    [
        (elf("GLIBC_2.17", "GLIBCXX_3.4.19"), (2, 17)),
        (elf("GLIBC_2.2.5", "GLIBCXX_3.4.29"), (2, 34)),
        (elf("GLIBC_2.34", "GLIBCXX_3.4.11", "CXXABI_1.3.9"), (2, 34)),
        (elf("GLIBC_2.14", "CXXABI_1.3.9"), (2, 24)),
        (elf("GLIBC_2.14", "GCC_3.0"), (2, 17)),
        (elf(), (2, 5)),
        (elf("GLIBCXX_3.4.99"), None),
        (elf("GLIBC_2.17", needed=("libc.so.6", "libaio.so.1")), None),
    ],
)
def test_floor_counts_glibc_and_the_runtimes(library: ElfFacts, wanted: tuple[int, int] | None) -> None:
    """Fault: "manylinux_2_17" because glibc's own symbols are old, while libstdc++ of that age lacks what is needed."""
    assert wheel.glibc_floor(library) == wanted


def part(parts: Path, **changes: object) -> None:
    """A manifest without a file worth reading."""
    made = replace(
        Manifest("cpu_adam", "linux-x86_64", "host", "cpu_adam.so", "key", "digest", "g++ 12", platform="linux-x86_64"),
        **changes,  # type: ignore[arg-type]
    )
    folder = parts / made.op / f"{made.variant}-{made.key}"
    folder.mkdir(parents=True)
    (folder / made.filename).write_bytes(b"")
    write_manifest(folder / f"{made.filename}.json", made)


def test_tag_is_read_from_every_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the tag of the first part is given to a wheel whose second part needs more."""
    from deepspeed_ops.op_builder import manifest

    floors = {"old.so": elf("GLIBC_2.17"), "new.so": elf("GLIBC_2.28"), "odd.so": elf(needed=("libaio.so.1",))}
    monkeypatch.setattr(manifest, "read_elf", lambda path: floors[path.name])
    part(tmp_path, filename="old.so", key="a")
    assert wheel.platform_tag(tmp_path) == "manylinux_2_17_x86_64"
    part(tmp_path, filename="new.so", key="b", op="other")
    part(tmp_path, kind="device", variant="sm90", filename="x.cubin", key="c", platform="")
    assert wheel.platform_tag(tmp_path) == "manylinux_2_28_x86_64"
    part(tmp_path, filename="odd.so", key="d", op="third")
    assert wheel.platform_tag(tmp_path) == "linux_x86_64"


def test_two_platforms_in_one_wheel_are_refused(tmp_path: Path) -> None:
    """Fault: a wheel for x86_64 that carries an aarch64 library left by an earlier build."""
    part(tmp_path)
    part(tmp_path, platform="linux-aarch64", variant="linux-aarch64")
    with pytest.raises(Exception, match="2 platforms"):
        wheel.platform_tag(tmp_path)


def test_git_version_info_keeps_deepspeeds_keys(tmp_path: Path) -> None:
    """Fault: a tool that reads the generated file misses a key, or finds torch where nothing was built against it."""
    wheel.write_git_version_info(tmp_path, version.Version("1.2.3+x", "abcdef0", "main"))
    found: dict[str, object] = {}
    text = (tmp_path / "deepspeed" / "git_version_info_installed.py").read_text(encoding="utf-8")
    exec(compile(text, "git_version_info_installed.py", "exec"), found)
    assert (found["version"], found["git_hash"], found["git_branch"]) == ("1.2.3+x", "abcdef0", "main")
    assert set(found["installed_ops"]) >= {"cpu_adam", "fused_adam"}  # type: ignore[call-overload]
    assert not any(found["installed_ops"].values()) and found["accelerator_name"] == ""  # type: ignore[attr-defined]
    keys = {"version", "bf16_support", "cuda_version", "nccl_version", "hip_version"}
    assert set(found["torch_info"]) == keys  # type: ignore[call-overload]
    part(tmp_path / "deepspeed_ops" / "parts")
    device = {"kind": "device", "compiler_release": (12, 1), "variant": "sm90", "platform": "", "key": "d"}
    part(tmp_path / "deepspeed_ops" / "parts", **device)
    wheel.write_git_version_info(tmp_path, version.Version("1.2.3+x", "abcdef0", "main"))
    text = (tmp_path / "deepspeed" / "git_version_info_installed.py").read_text(encoding="utf-8")
    exec(compile(text, "git_version_info_installed.py", "exec"), found)
    assert found["installed_ops"]["cpu_adam"] is True  # type: ignore[index]
    assert found["torch_info"]["cuda_version"] == "12.1" and found["accelerator_name"] == "cuda"  # type: ignore[index]


def test_build_lib_is_cleaned_of_everything_but_parts(tmp_path: Path) -> None:
    """Fault: a module that was deleted from the source ships again, out of last week's build folder."""
    for file in ("deepspeed/gone.py", "deepspeed_ops/gone.py", "deepspeed_ops/csrc/gone.cpp", "deepspeed_ops/parts/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("", encoding="utf-8")
    wheel.clean_build_lib(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()] == ["deepspeed_ops/parts/x"]


def test_nothing_asked_drops_old_parts_and_needs_no_compiler(tmp_path: Path) -> None:
    """Fault: `DS_BUILD_OPS=1 pip install .`, then `pip install .`: the second wheel carries the first one's parts."""
    part(tmp_path / "parts")
    wheel.build_parts(tmp_path / "parts", env={"PATH": ""})
    assert not (tmp_path / "parts").exists()
    assert wheel.build_requires({"PATH": ""}) == []


def test_an_unknown_variable_is_an_error_with_the_nearest_spelling(tmp_path: Path) -> None:
    """Fault: DS_BUILD_CPUADAM=1 installs happily, without the op."""
    with pytest.raises(Exception, match="DS_BUILD_CPU_ADAM"):
        wheel.build_parts(tmp_path / "parts", env={"DS_BUILD_CPUADAM": "1"})


def test_record_reads_back(tmp_path: Path) -> None:
    """Fault: the record in a wheel cannot be read by the version that wrote it."""
    wheel.write_version(tmp_path, version.Version("1.2.3+x", "abcdef0", "main"))
    data = json.loads((tmp_path / "deepspeed_ops" / "version.json").read_text(encoding="utf-8"))
    assert version.Version(**data) == version.Version("1.2.3+x", "abcdef0", "main")
