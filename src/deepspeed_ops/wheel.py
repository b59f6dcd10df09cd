"""What a build of this distribution asks for, carries and is called. ``setup.py`` and the build backend call it.

A wheel without parts is ``py3-none-any``; one with parts is ``py3-none-<platform>``, where ``manylinux_X_Y`` is read
from the finished libraries (:func:`platform_tag`) and never asserted. So the two cannot be confused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_ops.op_builder.errors import StoreError, UsageError
from deepspeed_ops.op_builder.faults import folder_is_held
from deepspeed_ops.op_builder.files import FILES
from deepspeed_ops.op_builder.settings import Settings
from deepspeed_ops.op_builder.spec import all_specs
from deepspeed_ops.version import RECORD, Version

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.manifest import ElfFacts, Manifest

BUILD_REPORT = "build-report.json"

# PEP 600: what every glibc distribution of that age has. libtvm_ffi comes with the package we depend on and is loaded
# before any op, as auditwheel's --exclude would have it.
_SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libutil|libgcc_s|libstdc\+\+|libnsl|libresolv|libtvm_ffi|ld-linux[-\w]*)\.so(\.\d+)*"
)
# What every Windows has, what comes with python.org's and conda's Python (vcruntime140) and with apache-tvm-ffi
# (msvcp140, tvm_ffi).
_WINDOWS_LIBRARIES = re.compile(
    r"(kernel32|user32|advapi32|bcrypt|msvcrt|ucrtbase|api-ms-win-[-a-z0-9]+|vcruntime140(_1)?|msvcp140|tvm_ffi)\.dll"
)
# The oldest glibc whose distributions have a libstdc++ and a libgcc with these symbol versions (PEP 600 and the policy
# table of auditwheel): family -> ((highest version, glibc), ...).
_RUNTIME_NEEDS: Mapping[str, tuple[tuple[tuple[int, ...], tuple[int, int]], ...]] = {
    "GLIBCXX_": (
        ((3, 4, 13), (2, 12)),
        ((3, 4, 19), (2, 17)),
        ((3, 4, 22), (2, 24)),
        ((3, 4, 24), (2, 28)),
        ((3, 4, 28), (2, 31)),
        ((3, 4, 29), (2, 34)),
        ((3, 4, 30), (2, 35)),
        ((3, 4, 33), (2, 39)),
    ),
    "CXXABI_": (
        ((1, 3, 3), (2, 12)),
        ((1, 3, 7), (2, 17)),
        ((1, 3, 10), (2, 24)),
        ((1, 3, 11), (2, 28)),
        ((1, 3, 12), (2, 31)),
        ((1, 3, 13), (2, 34)),
        ((1, 3, 15), (2, 39)),
    ),
    "GCC_": (((4, 8, 0), (2, 17)), ((7, 0, 0), (2, 28)), ((12, 0, 0), (2, 35)), ((14, 0, 0), (2, 39))),
}


def asked(settings: Settings) -> bool:
    """Whether the environment asks for any op to be built ahead of time."""
    return bool(settings.build_ops) or any(settings.build_op.values()) or settings.archs_ask


def build_requires(env: Mapping[str, str] | None = None) -> list[str]:
    """Requirements that the build asked for by ``env`` adds: NVRTC releases, where no compiler here has them."""
    settings = Settings.read(env)
    if not asked(settings):
        return []
    from deepspeed_ops.op_builder import aot

    return list(aot.build_requires(settings))


def build_parts(
    parts: Path, jobs: int | None = None, env: Mapping[str, str] | None = None, ready: Path | None = None
) -> None:
    """Build what ``env`` asks for into ``parts`` and drop whatever an earlier build left there.

    Args:
        parts: the folder of parts of this wheel or checkout.
        jobs: parallel compilers (``-j``); None: ``MAX_JOBS``, else as many as cores and memory allow.
        env: the environment.
        ready: finished parts, possibly of another platform, to take instead of building any.

    Raises:
        SettingError: an unknown ``DS_BUILD_*``.
        OpBuildError: an op asked for by name cannot be built.
        StoreError: a process holds a file of the old parts.
        UsageError: ``ready`` holds no part.
    """
    env = dict(os.environ if env is None else env)
    if jobs:
        env["MAX_JOBS"] = str(jobs)
    settings, parts = Settings.read(env), parts.absolute()  # compilers run in folders of their own
    if not FILES.remove_tree(parts):
        problem = folder_is_held(str(parts))
        raise StoreError(problem.what, problem.why, problem.fix)
    if ready is not None:
        if not manifests(ready):
            raise UsageError(f"{ready} holds no part", "expected <op>/<variant>-<key>/*.json below it", "")
        shutil.copytree(ready, parts)
        return
    if not asked(settings):
        return
    from deepspeed_ops.op_builder import aot

    report = aot.build_ahead(parts, settings, say=_say)
    parts.mkdir(parents=True, exist_ok=True)
    (parts / BUILD_REPORT).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    _say("\n".join(report.lines()))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def manifests(parts: Path) -> list[Manifest]:
    """The manifests of every part below ``parts``; empty where the folder is absent."""
    return [manifest for _, manifest in _located(parts)]


def _located(parts: Path) -> list[tuple[Path, Manifest]]:
    """(file, manifest) of every part below ``parts``."""
    if not parts.is_dir():
        return []
    from deepspeed_ops.op_builder.manifest import read_manifest

    found = [(path.parent, read_manifest(path)) for path in sorted(parts.glob("*/*/*.json"))]
    return [(folder / manifest.filename, manifest) for folder, manifest in found]


def platform_tag(parts: Path) -> str:
    """The platform tag that the parts below ``parts`` prove.

    Linux: ``manylinux_X_Y_<machine>`` with the highest floor found in the libraries, if they need nothing but what
    PEP 600 grants; else ``linux_<machine>``, which no index accepts and pip installs. Windows: the matrix' tag, if
    every DLL is of that machine and imports nothing but Windows, Python's C++ runtime and TVM-FFI.

    Raises:
        UsageError: the parts are for more than one platform, or a DLL needs what no wheel brings.
    """
    host = [(path, m) for path, m in _located(parts) if m.kind == "host"]
    platforms = sorted({m.platform for _, m in host})
    if len(platforms) > 1:
        raise UsageError(
            f"parts of {len(platforms)} platforms in one wheel: {', '.join(platforms)}",
            "a wheel has one platform tag",
            f"delete {parts} and build for one platform",
        )
    if platforms and platforms[0].startswith("windows-"):
        return _windows_tag(platforms[0], [path for path, _ in host])
    if not platforms or not platforms[0].startswith("linux-"):
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    from deepspeed_ops.op_builder.manifest import read_elf

    machine = platforms[0].split("-", 1)[1].replace("-", "_")
    floors = [glibc_floor(read_elf(path)) for path, _ in host]
    if None in floors:
        return f"linux_{machine}"
    return "manylinux_{}_{}_{}".format(*max(f for f in floors if f), machine)


def _windows_tag(platform: str, libraries: Iterable[Path]) -> str:
    """The tag of a Windows wheel, whatever system builds it: read from the DLLs themselves."""
    from deepspeed_ops.op_builder import matrix
    from deepspeed_ops.op_builder.manifest import read_pe

    for path in libraries:
        facts = read_pe(path)
        foreign = [name for name in facts.needed if not _WINDOWS_LIBRARIES.fullmatch(name.lower())]
        if facts.machine != platform.partition("-")[2] or foreign:
            why = f"it is for {facts.machine} and needs {', '.join(foreign) or 'nothing else'}"
            raise UsageError(f"{path.name} is no part for {platform}", why, f"delete {path.parent} and build it again")
    return matrix.load().platform(platform).wheel


def glibc_floor(library: ElfFacts) -> tuple[int, int] | None:
    """The glibc release from which on every distribution can load ``library``; None where none is known to.

    Counts what the library asks of glibc itself, and the age of the libstdc++ and libgcc it asks for.
    """
    if any(not _SYSTEM_LIBRARIES.fullmatch(needed) for needed in library.needed):
        return None
    floors: list[tuple[int, int] | None] = [library.glibc or (2, 5)]
    for _, symbol in library.version_needs:
        for family, rows in _RUNTIME_NEEDS.items():
            digits = symbol.removeprefix(family)
            if symbol.startswith(family) and re.fullmatch(r"\d+(\.\d+)*", digits):
                version = tuple(map(int, digits.split(".")))
                floors.append(next((glibc for highest, glibc in rows if version <= highest), None))
    return None if None in floors else max(f for f in floors if f)


def clean_build_lib(build_lib: Path) -> None:
    """Remove what an earlier build left of our packages, except parts: those are :func:`build_parts`' business."""
    shutil.rmtree(build_lib / "deepspeed", ignore_errors=True)
    ops = build_lib / "deepspeed_ops"
    for path in ops.iterdir() if ops.is_dir() else ():
        if path.is_dir() and path.name != "parts":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def write_version(packages: Path, version: Version) -> None:
    """Write the record that :func:`deepspeed_ops.version.current` reads where there is no checkout."""
    target = packages / "deepspeed_ops" / RECORD
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(version.to_json(), encoding="utf-8")


def write_git_version_info(build_lib: Path, version: Version) -> None:
    """Write ``deepspeed/git_version_info_installed.py``, with DeepSpeed's keys, into the build, never the source."""
    built = manifests(build_lib / "deepspeed_ops" / "parts")
    text = git_version_info_text(version, built)
    target = build_lib / "deepspeed" / "git_version_info_installed.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def git_version_info_text(version: Version, built: Iterable[Manifest]) -> str:
    """The text of ``git_version_info_installed.py``: literals under DeepSpeed's names."""
    from deepspeed_ops.git_version_info import facts

    lines = [f"{key} = {value!r}" for key, value in facts(version, list(built), tuple(all_specs())).items()]
    return "\n".join(['"""Written by setup.py when this wheel was built."""', "", *lines, ""])
