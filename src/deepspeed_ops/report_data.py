"""What ``ds_report`` shows, as plain values. :func:`gather` looks at the machine; the rest is pure."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.host import HostFacts
    from deepspeed_ops.op_builder.manifest import Manifest
    from deepspeed_ops.op_builder.toolchain import Toolchain

SCHEMA = 1
_TORCH_TIMEOUT_S = 120.0
_SMALL_SHM_BYTES = 512 << 20  # below this torch's data loaders and NCCL fail with bus errors
_ASK_TORCH = (
    "import json, torch; v = torch.version;"
    "print('\\n' + json.dumps([torch.__version__, list(torch.__path__), v.cuda, getattr(v, 'hip', None)]))"
)


@dataclass(frozen=True)
class TorchFacts:
    """What importing torch, in a process of its own, tells.

    Attributes:
        version: None where torch is absent or does not import.
        path: its folders.
        cuda: CUDA release it was built for.
        hip: HIP release it was built for.
        problem: why there is no version.
    """

    version: str | None = None
    path: tuple[str, ...] = ()
    cuda: str | None = None
    hip: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class Way:
    """How one half of an op (the host library, or the code for one device) would be loaded.

    Attributes:
        what: ``host`` or ``gpu 0 (NVIDIA H200, 9.0)``.
        action: ``load``, ``build`` or ``fail``.
        how: the part, or the compiler that would make it.
        why_not: every other candidate and why it was not taken.
        fix: what would cure a failure.
    """

    what: str
    action: str
    how: str
    why_not: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True)
class OpLine:
    """One op: whether this installation brought its parts, whether it can work here, and how."""

    op: str
    installed: bool
    compatible: bool
    ways: tuple[Way, ...] = ()
    note: str = ""

    @property
    def fails(self) -> bool:
        """Whether a half of it that is needed here can neither be loaded nor built."""
        return any(way.action == "fail" for way in self.ways) and not self.compatible


@dataclass(frozen=True)
class Report:
    """Everything ``ds_report`` shows."""

    version: str
    git_hash: str
    git_branch: str
    path: tuple[str, ...]
    compiled_with: str
    python: str
    host: Mapping[str, Any]
    tools: Mapping[str, Any]
    torch: TorchFacts
    shm_bytes: int | None
    ops: tuple[OpLine, ...]
    problems: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable; ``schema`` rises when a key changes its meaning."""
        return {"schema": SCHEMA, **asdict(self)}

    def failures(self, names: Sequence[str]) -> dict[str, str]:
        """Of the ops named: those that cannot work here, and why.

        Without names: of all ops, except those that merely have no GPU to run on.
        """
        known = {line.op: line for line in self.ops}
        wanted = list(names) or [n for n, line in known.items() if not line.ways or line.fails]
        found = {n: f"no op has this name; the registry holds {', '.join(known)}" for n in wanted if n not in known}
        for name in wanted:
            line = known.get(name)
            if line is not None and not line.compatible:
                failed = ["; ".join([f"{w.what}: {w.how}", *w.why_not]) for w in line.ways if w.action == "fail"]
                found[name] = "\n       ".join(failed) or line.note
        return found


def gather(env: Mapping[str, str] | None = None) -> Report:
    """Look at this machine and say what the ops would do on it. Never raises for what it finds: that is the report.

    Args:
        env: the environment; the process's by default.
    """
    env = dict(os.environ if env is None else env)
    asking = _start_torch(env)
    from deepspeed_ops import ops_report, version
    from deepspeed_ops.op_builder import HOME
    from deepspeed_ops.wheel import manifests

    seen = ops_report.look(env, HOME)
    here = version.current()
    places = (HOME / "parts", Path(sys.prefix, "share", "deepspeed-ops"))
    built = _quietly(lambda: [m for place in places for m in manifests(place)], [], seen.problems)
    return Report(
        version=here.version,
        git_hash=here.git_hash,
        git_branch=here.git_branch,
        path=_package_path(),
        compiled_with=compiled_with(built),
        python=f"{platform.python_version()} ({sys.executable})",
        host=host_facts(seen.host),
        tools=tool_facts(seen.toolchain),
        torch=_finish_torch(asking),
        shm_bytes=_shm_bytes(),
        ops=tuple(seen.ops),
        problems=tuple(seen.problems),
        skipped=_skipped(HOME / "parts"),
    )


def _quietly(ask: Any, default: Any, problems: list[str]) -> Any:
    try:
        return ask()
    except Exception as exc:  # whatever is broken here is a line of the report
        problems.append(f"{type(exc).__name__}: {exc}")
        return default


def compiled_with(built: Sequence[Manifest]) -> str:
    """The compilers and GPU architectures of the parts that came with the package.

    Nothing is compiled against torch; hence no torch release stands here.
    """
    if not built:
        return "no parts: an op is compiled at its first use"
    hosts = sorted({m.compiler for m in built if m.kind == "host"})
    archs: dict[str, list[str]] = {}
    for m in built:
        if m.kind == "device":
            archs.setdefault(m.compiler, []).append(m.variant)
    gpu = [f"{compiler} ({' '.join(sorted(set(v), key=_numeric))})" for compiler, v in sorted(archs.items())]
    return ", ".join([*hosts, *gpu])


def _numeric(variant: str) -> tuple[int, str]:
    digits = "".join(c for c in variant if c.isdigit())
    return int(digits or 0), variant


def host_facts(host: HostFacts) -> dict[str, Any]:
    """System, CPU, driver and GPUs as plain values."""
    driver = host.driver
    return {
        "platform": host.platform,
        "libc": " ".join([host.libc, ".".join(map(str, host.libc_version))]).strip(),
        "cpu_features": sorted(host.cpu_features),
        "driver": {"version": driver.version, "cuda": _dotted(driver.cuda)} if driver else None,
        "gpus": [
            {
                "ordinal": d.ordinal,
                "name": d.name,
                "capability": _dotted(d.capability),
                "memory_bytes": d.memory_bytes,
                "uuid": d.uuid,
            }
            for d in host.devices
        ],
        "notes": list(host.notes),
    }


def tool_facts(tools: Toolchain | None) -> dict[str, Any]:
    """Compilers, ninja and the FFI as plain values."""
    if tools is None:
        return {"host": None, "ninja": None, "nvcc": [], "nvrtc": [], "ffi": None, "problems": []}
    return {
        "host": {"version": _dotted(tools.host.version), "kind": tools.host.kind, "path": str(tools.host.path)}
        if tools.host
        else None,
        "ninja": str(tools.ninja) if tools.ninja else None,
        "nvcc": [{"version": _dotted(n.version), "path": str(n.path)} for n in tools.nvcc],
        "nvrtc": [{"version": _dotted(n.version), "path": str(n.library), "source": n.source} for n in tools.nvrtc],
        "ffi": {"version": tools.ffi.version} if tools.ffi else None,
        "problems": [{"what": p.what, "why": p.why, "fix": p.fix} for p in tools.problems],
    }


def _dotted(version: Sequence[int] | None) -> str | None:
    return ".".join(map(str, version)) if version else None


def _package_path() -> tuple[str, ...]:
    spec = importlib.util.find_spec("deepspeed") or importlib.util.find_spec("deepspeed_ops")
    return tuple(spec.submodule_search_locations or ()) if spec else ()


def _shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def shm_is_small(size: int | None) -> bool:
    """Whether /dev/shm is smaller than torch's data loaders need."""
    return size is not None and size < _SMALL_SHM_BYTES


def _skipped(parts: Path) -> dict[str, str]:
    """What the build of this installation left out, and why (``build-report.json``)."""
    from deepspeed_ops.wheel import BUILD_REPORT

    path = parts / BUILD_REPORT
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["skipped"]
        return {f"{s['op']} {s['variant']}".strip(): str(s["why"]) for s in found}
    except (ValueError, TypeError, KeyError):
        return {path.name: "unreadable"}


# ---- torch, in a process of its own: a broken one may kill whoever imports it ------------------------------------


def _start_torch(env: Mapping[str, str]) -> subprocess.Popen[str] | str:
    try:
        if importlib.util.find_spec("torch") is None:
            return "not installed"
        return subprocess.Popen(
            [sys.executable, "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    except (OSError, ValueError, ImportError) as exc:
        return f"cannot be looked at: {exc}"


def _finish_torch(asking: subprocess.Popen[str] | str) -> TorchFacts:
    if isinstance(asking, str):
        return TorchFacts(problem=asking)
    try:
        out, err = asking.communicate(timeout=_TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        asking.kill()
        asking.communicate()
        return TorchFacts(problem=f"does not import within {_TORCH_TIMEOUT_S:.0f} s")
    return torch_facts(asking.returncode, out, err)


def torch_facts(code: int, out: str, err: str) -> TorchFacts:
    """What the child process told.

    Args:
        code: its exit status; negative for a signal.
        out: its standard output; the last line is ours.
        err: its standard error.
    """
    last = next((line for line in reversed(out.splitlines()) if line.strip()), "")
    if code == 0:
        try:
            version, path, cuda, hip = json.loads(last)
            return TorchFacts(version, tuple(path), cuda, hip)
        except (ValueError, TypeError):
            return TorchFacts(problem=f"answered {last!r}")
    reason = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    ended = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
    return TorchFacts(problem=f"does not import ({ended}): {reason}" if reason else f"does not import ({ended})")
