"""Carry out a compile plan: host parts through ninja, GPU parts through NVRTC or nvcc, each published to a store.

A part is done when it stands at its final path in the store; nothing else remembers that it was built, so a build that
failed is simply tried again and shows its first error again.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from . import faults
from .commands import Problem
from .errors import CompileFailed, CompilerMissing, StoreError
from .files import FILES
from .manifest import Manifest, facts_as_fields, read_elf, read_gpu, read_macho, read_pe
from .ninja_file import host_steps, ninja_text
from .nvcc_host import host_of_nvcc
from .nvrtc import NvrtcFailed, open_nvrtc
from .plan import CompilePlan, PartPlan
from .process import platform_facts
from .settings import Settings
from .sources import Source, read_source
from .store import Part, Store, Workshop, store_errors
from .toolchain import HostCompiler, Nvcc, Nvrtc

log = logging.getLogger("deepspeed_ops")
Progress = Callable[[str], None]

_TIMEOUT_S = 3600.0
# Peak resident memory of one compiler on a source with the FFI headers: 326 MiB measured (g++ 12, cpu_adam.cpp);
# rounded up, since free memory is everybody's.
_JOB_BYTES = 512 << 20
_FIRST_ERROR = re.compile(
    r"\b(fatal )?error\b\s*(C\d+|LNK\d+)?\s*:|undefined (reference|symbol)|cannot find -l|multiple definition"
    r"|: not found|No such file or directory|No space left|nvcc fatal|LINK : fatal",
    re.IGNORECASE,
)


def build(
    plan: CompilePlan, store: Store, settings: Settings, progress: Progress | None = None, ninja: Path | None = None
) -> tuple[Part, ...]:
    """Build what the store does not hold yet.

    Args:
        plan: the parts.
        store: where they go.
        settings: for ``MAX_JOBS`` and the environment of the compilers.
        progress: told one line per part that is compiled, and one when another process is waited for.
        ninja: the ninja program; needed for host parts.

    Returns:
        The parts in the order of the plan.

    Raises:
        CompileFailed: a compiler failed.
        CompilerMissing: there is no ninja.
        StoreError: the store cannot be written, or is full.
    """

    def one(part: PartPlan) -> Part:
        return build_part(part, store, settings, progress, ninja)

    host = {p.key: one(p) for p in plan.parts if p.kind == "host"}  # ninja itself is parallel
    device = [p for p in plan.parts if p.kind == "device"]
    with ThreadPoolExecutor(max_workers=max(1, min(job_count(settings), len(device)))) as pool:
        done = {**host, **dict(zip((p.key for p in device), pool.map(one, device), strict=True))}
    return tuple(done[p.key] for p in plan.parts)


def build_part(
    part: PartPlan, store: Store, settings: Settings, progress: Progress | None = None, ninja: Path | None = None
) -> Part:
    """The part from the store, or built into it; at most one process of those that share the store builds it."""
    ready = store.find(part.op, part.variant, part.key)
    if ready is not None:
        return ready
    name = f"{part.op}.{part.variant}-{part.key[:20]}"
    with store.lock(name, progress):
        ready = store.find(part.op, part.variant, part.key)  # somebody may have built it while we waited
        if ready is not None:
            return ready
        log.info("building %s", part.log_line)
        if progress is not None:
            progress(part.log_line)
        refuse_long_paths(part, store)
        with store.workshop() as shop:
            file = shop.part / part.filename
            if part.kind == "host":
                _compile_host(part, shop, store.log_path(name), settings, ninja)
            elif isinstance(part.compiler, Nvrtc):
                _compile_nvrtc(part, part.compiler, file, store.log_path(name))
            else:
                _compile_nvcc(part, shop, file, store.log_path(name), settings)
            return store.publish(shop, part.filename, _describe(part, file))


def refuse_long_paths(part: PartPlan, store: Store, windows: bool = sys.platform == "win32") -> None:
    """Say before a compiler does, and better, that a host part's files would lie too deep for Windows' own tools.

    Raises:
        StoreError: a path would be longer than 259 characters.
    """
    if not windows or part.kind != "host":
        return
    work = store.root / ".work" / "1234567-123456789012" / "scratch"
    paths = [work / step.output for step in host_steps(part, work.parent / "part" / part.filename)]
    paths.append(store.final_folder(part.op, part.variant, part.key) / f"{part.filename}.json")
    longest = max((str(path) for path in paths), key=len)
    if len(longest) > faults.LONGEST_PATH:
        problem = faults.path_is_too_long(longest)
        raise StoreError(problem.what, problem.why, problem.fix)


def _describe(part: PartPlan, file: Path) -> Manifest:
    """The manifest of a finished file: what the plan says, and what is read back from the file itself."""
    asked = Manifest(
        op=part.op,
        variant=part.variant,
        kind="host" if part.kind == "host" else "device",
        filename=part.filename,
        key=part.key,
        source_digest=part.source_digest,
        compiler=part.compiler_name,
        compiler_release=part.compiler_release,
        flags=(*part.compile_flags, *part.link_flags),
        user_flags=part.all_user_flags,
        abi=part.abi,
        platform=part.platform,
        simd=tuple(part.spec.simd.get(part.platform.partition("-")[2], ())),
        created_by=part.version,
    )
    if part.kind == "device":
        facts = read_gpu(file.read_bytes(), str(file))
        lacking = sorted(set(part.spec.kernels) - set(facts.kernels))
        if facts.target != part.target or lacking:
            asked_for = part.target.code if part.target is not None else "?"
            raise CompileFailed(
                f"{part.log_line} made another part than asked for",
                f"asked for {asked_for}, the file is for {facts.target.code} and lacks the kernels {lacking}",
            )
        return replace(asked, **facts_as_fields(facts))
    reader = {".dll": read_pe, ".dylib": read_macho}.get(file.suffix, read_elf)
    library = reader(file)
    if library.machine != part.platform.partition("-")[2]:
        why = f"asked for {part.platform}, {file.name} is for {library.machine}"
        raise CompileFailed(f"{part.log_line} made a library of another machine", why, "set CXX to a compiler for it")
    return replace(asked, **facts_as_fields(library))


# What linkers read behind the command line's back. LD_RUN_PATH, which conda's build tools set, would put a folder of
# the build machine into every library as its RUNPATH.
_UNSEEN = frozenset({"LD_RUN_PATH"})

# --- host parts ---------------------------------------------------------------------------------------------------


def _compile_host(part: PartPlan, shop: Workshop, kept: Path, settings: Settings, ninja: Path | None) -> None:
    if ninja is None:
        raise CompilerMissing(f"op {part.op} cannot be compiled", "no ninja was found", "pip install ninja")
    steps = host_steps(part, shop.part.absolute() / part.filename)
    with store_errors(shop.scratch):
        (shop.scratch / "o").mkdir()
        (shop.scratch / "build.ninja").write_text(ninja_text(steps), encoding="utf-8")
    jobs = min(job_count(settings), len(steps))
    extra = dict(part.compiler.env) if isinstance(part.compiler, HostCompiler) else {}
    env = {k: v for k, v in settings.env.items() if k not in _UNSEEN} | extra
    code, output = _run([str(ninja), "-v", "-j", str(jobs)], shop.scratch, env)
    if code != 0:
        _fail(part, _failed_command(output) or steps[0].argv, code, output, kept)


def _failed_command(output: str) -> tuple[str, ...]:
    """The command below ninja's first FAILED line."""
    match = re.search(r"^FAILED:[^\n]*\n([^\n]+)", output, re.MULTILINE)
    return (match[1],) if match else ()


# --- GPU parts ----------------------------------------------------------------------------------------------------


def _unity(part: PartPlan) -> tuple[str, str]:
    """Name and text of the one source a GPU compiler gets; several sources are included in the order of the spec."""
    if len(part.sources) == 1:
        return part.sources[0].rel, read_source(part.sources[0].path)
    return f"{part.op}.cu", "".join(f'#include "{s.rel}"\n' for s in part.sources)


def _compile_nvrtc(part: PartPlan, compiler: Nvrtc, file: Path, kept: Path) -> None:
    assert part.target is not None
    name, text = _unity(part)
    headers = {spelled: read_source(source.path) for spelled, source in part.headers.items()}
    if len(part.sources) > 1:
        headers.update({s.rel: read_source(s.path) for s in part.sources})
    try:
        image, _ = open_nvrtc(compiler).compile(text, name, headers, part.compile_flags, target=part.target)
    except NvrtcFailed as exc:
        command = (str(compiler.library), part.target.gencode, *part.compile_flags, name)
        _fail(part, command, 1, f"{exc.why}\n{exc.output}", kept)
    with store_errors(file.parent):
        file.write_bytes(image)


def _compile_nvcc(part: PartPlan, shop: Workshop, file: Path, kept: Path, settings: Settings) -> None:
    """nvcc passes its arguments through a shell that expands ``$``: it gets copies, by relative names without one."""
    assert part.target is not None and isinstance(part.compiler, Nvcc)
    name, text = _unity(part)
    with store_errors(shop.scratch):
        for source in (*part.sources, *part.headers.values()):
            _copy(source, shop.scratch / "src" / source.rel)
        if len(part.sources) > 1:
            (shop.scratch / "src" / name).write_text(text, encoding="utf-8")
    kind = ("-cubin", part.target.gencode) if part.target.kind == "sass" else ("-ptx", f"-arch={part.target.compute}")
    found = host_of_nvcc(settings, platform_facts(), part.compiler.version)
    if isinstance(found, Problem):
        raise CompilerMissing(f"{part.log_line}: {found.what}", found.why, found.fix)
    host = ("-ccbin", str(found.path)) if found is not None and len(found.argv) <= 1 else ()
    env = {**settings.env, **(dict(found.env) if found is not None else {})}
    argv = (str(part.compiler.path), *kind, *part.compile_flags, *host, "-I", "src", "-o", "out", f"src/{name}")
    code, output = _run(argv, shop.scratch, env)
    if code != 0:
        _fail(part, argv, code, output, kept)
    with store_errors(shop.part):
        FILES.replace(shop.scratch / "out", file)


def _copy(source: Source, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(read_source(source.path), encoding="utf-8")


# --- running ------------------------------------------------------------------------------------------------------


def _run(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            list(argv),
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        return 124, f"{exc.stdout!s}\nerror: stopped after {_TIMEOUT_S:.0f} s"
    except OSError as exc:
        return 127, f"error: {argv[0]} did not start: {exc}"
    return done.returncode, done.stdout


def _fail(part: PartPlan, command: Sequence[str], code: int, output: str, kept: Path) -> NoReturn:
    """Raise what a failed compiler means; its whole output is kept beside the store's parts."""
    text = " ".join(command) if len(command) == 1 else shlex.join(command)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(f"{text}\n\n{output}", encoding="utf-8")
        place = str(kept)
    except OSError as exc:
        place = f"(not kept: {exc})"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    first = next((line for line in lines if _FIRST_ERROR.search(line)), lines[-1] if lines else "(no output)")
    if "No space left on device" in output or "Disk quota exceeded" in output:
        fix = "free space there, or set TORCH_EXTENSIONS_DIR to a folder on another disk"
        raise StoreError(f"the disk is full while compiling {part.op} {part.variant}", first, fix)
    why = f"{first}\n  command: {text}\n  exit code: {code}\n  log: {place}"
    raise CompileFailed(f"{part.log_line} failed", why, f"read {place}", log=place)


def job_count(settings: Settings) -> int:
    """Parallel compilers: ``MAX_JOBS``, else as many as cores and free memory allow."""
    if settings.max_jobs is not None:
        return settings.max_jobs
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = free_bytes()
    return max(1, cores if free is None else min(cores, free // _JOB_BYTES))


def free_bytes(root: Path = Path("/")) -> int | None:
    """Free memory in bytes, the container's limit included; None where it cannot be told."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        free = int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    try:
        group = root / "sys/fs/cgroup"
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        return max(0, min(free, limit - int((group / "memory.current").read_text(encoding="utf-8"))))
    except (OSError, ValueError):  # no limit: the file says "max" or is absent
        return free


# Without torch, which no part needs and whose import takes seconds.
_CHILD = "import sys; sys.modules['torch'] = None; import tvm_ffi; tvm_ffi.load_module(sys.argv[1])"


def loads_in_child(path: Path, settings: Settings) -> str:
    """Load a host library in a process of its own; empty where that went well, else what happened.

    For a part that the last process died in: this one shall not.
    """
    code, output = _run([sys.executable, "-c", _CHILD, str(path)], path.parent, settings.env)
    if code == 0:
        return ""
    lines = output.strip().splitlines()
    return f"a child process that loaded it ended with {code}" + (f": {lines[-1]}" if lines else "")


def fetch_nvrtc(requirement: str, folder: Path, settings: Settings, brings: str = "nvidia") -> None:
    """Install the package ``requirement`` as ``folder`` with pip, touching no environment.

    The folder appears by one rename: whoever is killed on the way leaves nothing that looks like a compiler.

    Args:
        requirement: with its version.
        folder: where it goes.
        settings: the environment of pip.
        brings: top-level folder of the package: where it is, nothing is missing.

    Raises:
        CompilerMissing: pip failed; its output stands in ``why``.
    """
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    with store_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        code, output = _run([*argv, "--quiet", "--target", str(private), requirement], private, settings.env)
        if code != 0:
            last = "; ".join(output.strip().splitlines()[-2:])
            raise CompilerMissing(f"{requirement} could not be installed", last, f"pip install {requirement}")
        private.chmod(0o755)
        with store_errors(folder):
            try:
                if not (folder / brings).is_dir():
                    FILES.remove_tree(folder)  # half of one, left by an older release of this project
                FILES.rename(private, folder)
            except OSError:
                if not (folder / brings).is_dir():  # not somebody who was faster
                    raise
    finally:
        FILES.remove_tree(private)
