"""What would be compiled, with which flags, under which key: a pure function of spec, toolchain and targets.

Wheels, conda packages, images and run-time builds all follow the same plan. Flags are written here without a machine's
paths (those are added when a command line is made), so that equal inputs in two environments give equal keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .choose import DeviceCompiler, choose_device_compiler, compiler_name
from .errors import CompilerMissing
from .host import HostFacts
from .settings import Settings
from .sources import Source, digest, digest_of, ffi_abi, find_headers, sources_of
from .spec import OpSpec
from .targets import Target
from .toolchain import FFI, HostCompiler, Nvcc, Nvrtc, Toolchain

# No -march: the code chooses its SIMD level at run time. No contraction: it says fma where it means fma, so that every
# level and compiler gives equal bits. libstdc++ and libgcc stay shared: libtvm_ffi.so has already loaded both, so they
# cost nothing, and Fedora and its kin ship g++ without the static libstdc++ that -static-libstdc++ would need.
_GNU_COMPILE = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-pthread",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # TVM-FFI's export macro has one
    "-Wno-maybe-uninitialized",  # gcc's own AVX-512 header trips it
)
_GCC_ONLY = ("-Wno-maybe-uninitialized",)
# Every symbol resolved at link and load time: a missing one is an error now, not in the middle of a training run.
_GNU_LINK = ("-shared", "-pthread", "-Wl,-z,now", "-Wl,-z,defs", "-Wl,--as-needed")
_APPLE_LINK = ("-dynamiclib", "-pthread", "-Wl,-undefined,error")
# gcc for Windows, a DLL that needs nothing but Windows and tvm_ffi.dll. The system keeps 16 bytes of alignment on the
# stack and gcc assumes 32 and 64 for its vector spills: the assembler makes every vector move an unaligned one. What is
# exported is what says so; TVM-FFI's header knows only MSVC's way of saying it. posix_memalign: that header calls it
# for types that need more than malloc's 16 bytes, which none of its objects and none of ours does; free() could not
# free what Windows offers instead, so it answers ENOMEM.
_MINGW_COMPILE = (
    *(f for f in _GNU_COMPILE if not f.startswith(("-fPIC", "-fvisibility", "-pthread"))),
    "-Wa,-muse-unaligned-vector-move",
    "-DTVM_FFI_DLL=",
    "-DTVM_FFI_DLL_EXPORT=__declspec(dllexport)",
    "-Dposix_memalign(pointer,alignment,size)=12",
)
_MINGW_LINK = ("-shared", "-static", "-s", "-Wl,--no-insert-timestamp")
_MSVC_COMPILE = ("/nologo", "/O2", "/std:c++17", "/EHsc", "/utf-8", "/fp:precise", "/MD", "/W3", "/Zc:__cplusplus")
_MSVC_LINK = ("/nologo", "/LD", "/MD")
# clang-cl's /fp:precise contracts; cl's does not without /arch.
_CLANG_CL_ONLY = ("/clang:-ffp-contract=off",)
# The same for both GPU compilers. No contraction, as on the host: kernels write their fma out, so CPU and GPU give
# equal bits. No -lineinfo: it makes a part ten times larger.
DEVICE_FLAGS = ("--std=c++17", "--fmad=false")

_LIBRARY_SUFFIX = {"linux": ".so", "windows": ".dll", "macos": ".dylib"}


@dataclass(frozen=True)
class PartPlan:
    """One part to be: everything that decides its bytes.

    Attributes:
        op: the op's name.
        variant: ``linux-x86_64``, ``sm90``, ...
        kind: ``host`` or ``device``.
        filename: of the finished part.
        sources: files given to the compiler.
        headers: files they include, by the name the directive spells.
        compile_flags: without paths.
        link_flags: without paths; host parts only.
        user_flags: what ``CPPFLAGS``, ``CFLAGS``, ``CXXFLAGS`` add to compiling.
        user_link_flags: what ``LDFLAGS`` adds to linking.
        compiler: the tool.
        compiler_name: ``g++ 12.2.0``, ``nvrtc 13.0``.
        compiler_release: CUDA release of a device compiler.
        target: of a device part.
        abi: ``tvm-ffi 0.1`` for host parts, empty for device parts, which are data.
        platform: of a host part.
        ffi: where TVM-FFI's headers and library lie; host parts only.
        csrc: root of the sources.
        spec: the op.
        version: the package's version.
        source_digest: what makes a part stale.
        key: what makes a part another part.
    """

    op: str
    variant: str
    kind: str
    filename: str
    sources: tuple[Source, ...]
    headers: Mapping[str, Source]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    user_flags: tuple[str, ...]
    user_link_flags: tuple[str, ...]
    compiler: HostCompiler | Nvcc | Nvrtc
    compiler_name: str
    compiler_release: tuple[int, int] | None
    target: Target | None
    abi: str
    platform: str
    ffi: FFI | None
    csrc: Path
    spec: OpSpec
    version: str
    source_digest: str
    key: str

    @property
    def all_user_flags(self) -> tuple[str, ...]:
        """What a manifest records."""
        return (*self.user_flags, *self.user_link_flags)

    @property
    def log_line(self) -> str:
        """The one line a build prints for this part, the same whichever compiler does it."""
        flag = f" {self.target.gencode}" if self.target is not None else ""
        return f"{self.op} {self.variant}: {self.compiler_name}{flag}"


@dataclass(frozen=True)
class CompilePlan:
    """The parts to build, host part first."""

    parts: tuple[PartPlan, ...]


def package_version(home: Path) -> str:
    """The public version of the package below ``home``, without what a build appends; "0" where none is written."""
    text, record = home / "version.txt", home / "version.json"
    if text.is_file():
        found = text.read_text(encoding="utf-8")
    elif record.is_file():
        found = str(json.loads(record.read_text(encoding="utf-8")).get("version", "0"))
    else:
        found = "0"
    return found.strip().partition("+")[0]


def library_name(op: str, host: HostFacts) -> str:
    """File name of an op's host library on ``host``."""
    return f"{op}.{host.platform}{_LIBRARY_SUFFIX.get(host.system, '.so')}"


def host_flags(kind: str, system: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags for compiling and for linking, by the compiler's kind (:class:`HostCompiler`) and system alone."""
    if kind in ("msvc", "clang-cl"):
        return _MSVC_COMPILE + (_CLANG_CL_ONLY if kind == "clang-cl" else ()), _MSVC_LINK
    if kind == "mingw":
        return _MINGW_COMPILE, _MINGW_LINK
    flags = _GNU_COMPILE if kind == "gcc" else tuple(f for f in _GNU_COMPILE if f not in _GCC_ONLY)
    return flags, _APPLE_LINK if system == "macos" else _GNU_LINK


def plan_host(
    spec: OpSpec, toolchain: Toolchain, settings: Settings, host: HostFacts, csrc: Path, version: str
) -> PartPlan:
    """The host library of an op.

    Raises:
        CompilerMissing: no C++ compiler, or no TVM-FFI to build against; ``why`` says what was looked at.
    """
    compiler, ffi = _host_tools(spec, toolchain)
    compile_flags, link_flags = host_flags(compiler.kind, host.system)
    sources, abi = sources_of(csrc, spec.host), ffi_abi(ffi.version)
    source_digest = digest_of("host", sources, headers := find_headers(csrc, sources), abi)
    user = (*settings.cppflags, *settings.cflags, *settings.cxxflags)
    key = digest(
        {
            "source": [spec.name, source_digest, abi, version],
            "flags": [compile_flags, link_flags, user, settings.ldflags],
            "compiler": compiler.identity,
            "platform": [host.platform, host.libc],
        }
    )
    return PartPlan(
        op=spec.name,
        variant=host.platform,
        kind="host",
        filename=library_name(spec.name, host),
        sources=sources,
        headers=headers,
        compile_flags=compile_flags,
        link_flags=link_flags,
        user_flags=user,
        user_link_flags=settings.ldflags,
        compiler=compiler,
        compiler_name=compiler_name(compiler),
        compiler_release=None,
        target=None,
        abi=abi,
        platform=host.platform,
        ffi=ffi,
        csrc=csrc.resolve(),
        spec=spec,
        version=version,
        source_digest=source_digest,
        key=key,
    )


def _host_tools(spec: OpSpec, toolchain: Toolchain) -> tuple[HostCompiler, FFI]:
    if toolchain.host is not None and toolchain.ffi is not None:
        return toolchain.host, toolchain.ffi
    lacking = "C++ compiler" if toolchain.host is None else "apache-tvm-ffi"
    why = "; ".join(f"{p.what}: {p.why}" for p in toolchain.problems) or "none was found"
    fix = next((p.fix for p in toolchain.problems if p.fix), "")
    raise CompilerMissing(f"op {spec.name} cannot be compiled here: no {lacking}", why, fix)


def plan_device(spec: OpSpec, target: Target, compiler: DeviceCompiler, csrc: Path, version: str) -> PartPlan:
    """The device part of an op for one target by one compiler."""
    sources = sources_of(csrc, spec.device)
    headers = find_headers(csrc, sources)
    source_digest = digest_of("device", sources, headers, "")
    key = digest(
        {
            "source": [spec.name, source_digest, version],
            "flags": DEVICE_FLAGS,
            "compiler": compiler.identity,
            "target": target.variant,
        }
    )
    return PartPlan(
        op=spec.name,
        variant=target.variant,
        kind="device",
        filename=f"{spec.name}.{target.variant}.{'cubin' if target.kind == 'sass' else 'ptx'}",
        sources=sources,
        headers=headers,
        compile_flags=DEVICE_FLAGS,
        link_flags=(),
        user_flags=(),
        user_link_flags=(),
        compiler=compiler,
        compiler_name=compiler_name(compiler),
        compiler_release=(compiler.version[0], compiler.version[1]),
        target=target,
        abi="",
        platform="",
        ffi=None,
        csrc=csrc.resolve(),
        spec=spec,
        version=version,
        source_digest=source_digest,
        key=key,
    )


def plan(
    spec: OpSpec,
    toolchain: Toolchain,
    targets: Sequence[Target],
    settings: Settings,
    host: HostFacts,
    *,
    home: Path,
    with_host: bool = True,
    releases: Mapping[Target, tuple[int, int]] | None = None,
) -> CompilePlan:
    """Every part of an op for these targets.

    Args:
        spec: the op.
        toolchain: what compilers are here.
        targets: GPU targets; taken in numeric order, whatever order they come in.
        settings: for the user's flags.
        host: the platform to build for.
        home: holds ``csrc`` and the version.
        with_host: also plan the host library.
        releases: CUDA release that must make a target; without an entry the newest here does.

    Raises:
        CompilerMissing: no compiler here makes one of them.
    """
    csrc, version = home / "csrc", package_version(home)
    parts = [plan_host(spec, toolchain, settings, host, csrc, version)] if with_host and spec.host else []
    for target in sorted(set(targets)) if spec.device else ():
        compiler = choose_device_compiler(target, toolchain, release=(releases or {}).get(target))
        parts.append(plan_device(spec, target, compiler, csrc, version))
    return CompilePlan(tuple(parts))
