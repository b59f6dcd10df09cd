"""What the environment asks for, read once per top-level call into a frozen value and never written.

Every other room takes a :class:`Settings` instead of looking at ``os.environ``, so that two calls with equal settings
decide alike and a test needs no monkeypatching.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .errors import SettingError
from .spec import OpSpec, all_specs

_BUILD_PREFIX = "DS_BUILD_"
_BUILD_OPS = "DS_BUILD_OPS"
_BUILD_STRING = "DS_BUILD_STRING"


@dataclass(frozen=True)
class Settings:
    """The environment, frozen.

    Attributes:
        env: a read-only copy of the whole environment, for subprocesses.
        ops_path: extra part stores (``DS_OPS_PATH``), searched first.
        jit: False where ``DS_JIT=0`` forbids compiling at run time.
        arch_list: ``TORCH_CUDA_ARCH_LIST`` as written, None where unset or blank.
        extensions_dir: ``TORCH_EXTENSIONS_DIR``.
        max_jobs: ``MAX_JOBS``, at least 1.
        cuda_home: ``CUDA_HOME``, else ``CUDA_PATH``.
        cc: ``CC``.
        cxx: ``CXX``.
        cflags: ``CFLAGS``, split as a shell does.
        cxxflags: ``CXXFLAGS``, split.
        cppflags: ``CPPFLAGS``, split.
        ldflags: ``LDFLAGS``, split.
        build_ops: ``DS_BUILD_OPS``, None where unset.
        build_op: ``DS_BUILD_<OP>`` by op name; only those that are set.
        build_string: ``DS_BUILD_STRING`` as written, None where unset.
        skip_cuda_check: ``DS_SKIP_CUDA_CHECK=1``.
    """

    env: Mapping[str, str]
    ops_path: tuple[Path, ...] = ()
    jit: bool = True
    arch_list: str | None = None
    extensions_dir: Path | None = None
    max_jobs: int | None = None
    cuda_home: str | None = None
    cc: str | None = None
    cxx: str | None = None
    cflags: tuple[str, ...] = ()
    cxxflags: tuple[str, ...] = ()
    cppflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    build_ops: bool | None = None
    build_op: Mapping[str, bool] = field(default_factory=dict)
    build_string: str | None = None
    skip_cuda_check: bool = False

    @property
    def archs_ask(self) -> bool:
        """Whether ``TORCH_CUDA_ARCH_LIST`` alone asks for GPU ops ahead of time: it is set, and no ``DS_BUILD_*`` is.

        So ``TORCH_CUDA_ARCH_LIST="6.1;7.5;8.6" pip install .`` builds for these, as people expect of it. Many images
        set the variable for other reasons, so an op that cannot be built then is skipped with its reason, never an
        error.
        """
        return self.arch_list is not None and self.build_ops is None and not self.build_op

    @property
    def user_flags(self) -> tuple[str, ...]:
        """Every flag the user adds to a host part, in the order the command lines take them."""
        return (*self.cppflags, *self.cflags, *self.cxxflags, *self.ldflags)

    @classmethod
    def read(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        specs: Mapping[str, OpSpec] | None = None,
        isdir: Callable[[str], bool] = os.path.isdir,
    ) -> Settings:
        """Read ``env`` (default: this process's environment).

        Args:
            env: variables by name.
            specs: the registry; default: :func:`op_builder.spec.all_specs`.
            isdir: tells whether a path is a folder; only asked for a ``CUDA_HOME`` that looks like a list.

        Raises:
            SettingError: an unknown ``DS_BUILD_*``, or a value of the wrong form.
        """
        env = MappingProxyType(dict(os.environ if env is None else env))
        build_op = _build_ops(env, all_specs() if specs is None else specs)
        extensions = env.get("TORCH_EXTENSIONS_DIR", "").strip()
        return cls(
            env=env,
            ops_path=tuple(Path(p) for p in env.get("DS_OPS_PATH", "").split(os.pathsep) if p.strip()),
            jit=_switch(env, "DS_JIT") is not False,
            arch_list=env.get("TORCH_CUDA_ARCH_LIST", "").strip() or None,
            extensions_dir=Path(extensions) if extensions else None,
            max_jobs=_max_jobs(env),
            cuda_home=_cuda_home(env, isdir),
            cc=env.get("CC", "").strip() or None,
            cxx=env.get("CXX", "").strip() or None,
            cflags=_flags(env, "CFLAGS"),
            cxxflags=_flags(env, "CXXFLAGS"),
            cppflags=_flags(env, "CPPFLAGS"),
            ldflags=_flags(env, "LDFLAGS"),
            build_ops=_switch(env, _BUILD_OPS),
            build_op=build_op,
            build_string=env.get(_BUILD_STRING),
            skip_cuda_check=env.get("DS_SKIP_CUDA_CHECK", "").strip() == "1",
        )


def _switch(env: Mapping[str, str], name: str) -> bool | None:
    """``0`` or ``1``; None where unset or empty."""
    value = env.get(name, "").strip()
    if value == "":
        return None
    if value in ("0", "1"):
        return value == "1"
    raise SettingError(f"{name}={value!r} is not a switch", "expected 0 or 1 (empty counts as unset)", f"{name}=1")


def _build_ops(env: Mapping[str, str], specs: Mapping[str, OpSpec]) -> Mapping[str, bool]:
    by_var = {spec.env_var: name for name, spec in specs.items()}
    known = [*by_var, _BUILD_OPS, _BUILD_STRING]
    found: dict[str, bool] = {}
    for var in sorted(v for v in env if v.startswith(_BUILD_PREFIX)):
        if var not in known:
            near = difflib.get_close_matches(var, known, 1)
            fix = f"{near[0]}={env[var]}" if near else "use one of: " + ", ".join(sorted(known))
            raise SettingError(f"{var}={env[var]!r} names no op of this distribution", "no op has that variable", fix)
        value = _switch(env, var) if var in by_var else None
        if value is not None:
            found[by_var[var]] = value
    return MappingProxyType(found)


def _max_jobs(env: Mapping[str, str]) -> int | None:
    value = env.get("MAX_JOBS", "").strip()
    if value == "":
        return None
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    raise SettingError(f"MAX_JOBS={value!r} is no number of jobs", "expected a whole number, 1 or more", "MAX_JOBS=2")


def _cuda_home(env: Mapping[str, str], isdir: Callable[[str], bool]) -> str | None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        value = env.get(name, "").strip()
        if not value:
            continue
        if os.pathsep in value and not isdir(value):  # a folder with ":" in its name is legal, a list is not
            first = next((p for p in value.split(os.pathsep) if p), "/usr/local/cuda")
            raise SettingError(
                f"{name}={value!r} is a list of paths", "expected the one folder of a CUDA toolkit", f"{name}={first}"
            )
        return value
    return None


def _flags(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    value = env.get(name, "")
    windows = sys.platform == "win32"  # there a backslash separates folders and quotes nothing
    try:
        parts = shlex.split(value, posix=not windows)
    except ValueError as exc:
        what = f"{name}={value!r} cannot be split into flags"
        raise SettingError(what, str(exc), f"close the quote in {name}") from exc
    return tuple(p.strip('"') if windows else p for p in parts)
