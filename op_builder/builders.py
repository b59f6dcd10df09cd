"""DeepSpeed's names for all this: ``CPUAdamBuilder().load()``, ``.is_compatible()``, ``ALL_OPS``.

One class per spec, made from the registry: a new op's builder appears by itself. A builder decides nothing; it asks the
loader and the resolver. ``is_compatible()`` is True exactly where ``load()`` would find or build the op, and
``error_log`` holds the reason where it is not.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import CompilerMissing, LoadFailed, OpsError
from .settings import Settings
from .spec import OpSpec, all_specs

if TYPE_CHECKING:
    from .loader import Loader
    from .plan import CompilePlan

log = logging.getLogger("deepspeed_ops")

HOME = Path(__file__).resolve().parent.parent


class MissingCUDAException(CompilerMissing):
    """No nvcc was found where a toolkit was asked for by name."""


class CUDAMismatchException(OpsError):
    """Kept for code that catches it: nothing here depends on torch's and nvcc's CUDA being equal."""


class OpBuilder:
    """One op. Subclasses are made from the registry and set ``SPEC``, ``BUILD_VAR`` and ``NAME``.

    Args:
        name: kept for DeepSpeed's signature; the class's own name counts.
        home: the checkout or installed package.
        settings: default: the environment at each call.
    """

    SPEC: ClassVar[OpSpec]
    BUILD_VAR: ClassVar[str] = ""
    NAME: ClassVar[str] = ""

    def __init__(self, name: str | None = None, *, home: Path = HOME, settings: Settings | None = None) -> None:
        self.name = name or self.NAME
        self.home = home
        self.jit_mode = False
        self.build_for_cpu = not self.SPEC.device
        self.error_log: str | None = None
        self._settings = settings

    # --- what it is ---

    def absolute_name(self) -> str:
        """DeepSpeed's module path of the compiled op."""
        return self.SPEC.absolute_name

    def sources(self) -> list[str]:
        """Host and GPU sources, relative to the checkout or installed package."""
        return [f"csrc/{name}" for name in (*self.SPEC.host, *self.SPEC.device)]

    def include_paths(self) -> list[str]:
        """Include folders of the host part: ours, relative like :meth:`sources`, then TVM-FFI's."""
        from .process import platform_facts
        from .toolchain import FFI, find_ffi

        ffi = find_ffi(platform_facts())
        return ["csrc", *(str(p) for p in (ffi.include if isinstance(ffi, FFI) else ()))]

    def cxx_args(self) -> list[str]:
        """Compiler flags of the host part, without paths."""
        return list(self._host_flags()[0])

    def extra_ldflags(self) -> list[str]:
        """Linker flags of the host part, without paths."""
        return [*self._host_flags()[1], "-ltvm_ffi"]

    def nvcc_args(self) -> list[str]:
        """Flags of the GPU part, without the target; empty for an op without GPU code."""
        from .plan import DEVICE_FLAGS

        return list(DEVICE_FLAGS) if self.SPEC.device else []

    def _host_flags(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        from .plan import host_flags
        from .process import platform_facts

        system = platform_facts().system
        return host_flags({"windows": "msvc", "macos": "clang"}.get(system, "gcc"), system)

    # --- whether it works here ---

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether :meth:`load` would find or build the op here: for the host, and for a GPU if it has GPU code.

        Args:
            verbose: also log the reason where it would not.
        """
        self.error_log = None
        try:
            self.error_log = self._why_not()
        except OpsError as exc:
            self.error_log = str(exc)
        if self.error_log and verbose:
            self.warning(self.error_log)
        return not self.error_log

    def builder_available(self) -> bool:
        """The same question under the name that newer callers use."""
        return self.is_compatible()

    def _why_not(self) -> str | None:
        from .host import detect

        if self.SPEC.python_only:
            return None
        loader = self._loader()
        resolution = loader.resolution(self.NAME)
        if resolution.choice is None:
            return str(resolution.error())
        if not self.SPEC.device:
            return None
        host = detect(loader.settings.env)
        if not host.devices:
            return f"op {self.NAME} runs on a GPU and none is visible: " + ("; ".join(host.notes) or "no device")
        cuda = host.driver.cuda if host.driver is not None else None
        found = [loader.resolution(self.NAME, device, cuda) for device in host.devices]
        # A GPU that the op cannot use blocks none that it can.
        return None if any(r.choice is not None for r in found) else str(found[0].error())

    def _loader(self) -> Loader:
        from .loader import Loader

        settings = self._settings if self._settings is not None else Settings.read()
        return Loader(settings, home=self.home, spec_of=lambda _: self.SPEC)

    def warning(self, msg: str) -> None:
        """Remember a reason and log it."""
        self.error_log = msg
        log.warning("%s", msg)

    # --- getting it ---

    def load(self, verbose: bool = True) -> Any:
        """The op's functions on torch tensors, under DeepSpeed's names and argument order.

        Raises:
            OpsError: it neither lies ready nor can be built; the error says what was looked at.
        """
        try:
            face = importlib.import_module(self.SPEC.face)
        except ModuleNotFoundError as exc:
            why = f"{exc}; the functions of {self.NAME} live in {self.SPEC.face}"
            raise LoadFailed(f"op {self.NAME} has no face here", why, "put src of the checkout on sys.path") from exc
        return face.module()

    def jit_load(self, verbose: bool = True) -> Any:
        """The same as :meth:`load`: what lies ready is taken, anything else is built."""
        self.jit_mode = True
        return self.load(verbose)

    def builder(self) -> CompilePlan:
        """What building the op here would do: the plan that ahead-of-time and run-time builds share.

        Raises:
            CompilerMissing: no compiler here can.
        """
        from .plan import plan
        from .process import platform_facts
        from .toolchain import discover

        loader = self._loader()
        host = platform_facts()
        toolchain = discover(loader.settings, host)
        targets = self._targets(loader.settings, None) if self.SPEC.device else ()
        return plan(self.SPEC, toolchain, targets, loader.settings, host, home=self.home)

    def _targets(self, settings: Settings, arch_list: str | None) -> tuple[Any, ...]:
        from .aot import targets_for

        return tuple(targets_for(self.SPEC, settings, arch_list))

    # --- what code around DeepSpeed's builders calls ---

    def has_function(
        self,
        funcname: str,
        libraries: Sequence[str],
        library_dirs: Sequence[str] | None = None,
        verbose: bool = False,
    ) -> bool:
        """Whether a C function links from system libraries; the reason stands in ``error_log`` where it does not."""
        import dataclasses

        from .probes import has_function
        from .process import platform_facts
        from .toolchain import discover_host

        settings = self._loader().settings
        flags = (*settings.ldflags, *(f"-L{folder}" for folder in library_dirs or ()))
        compiler = discover_host(settings, platform_facts()).host
        verdict = has_function(funcname, libraries, compiler, dataclasses.replace(settings, ldflags=flags))
        if not verdict:
            self.error_log = str(verdict)
        return bool(verdict)

    def command_exists(self, cmd: str) -> bool:
        """Whether one of the programs in ``a|b`` is on PATH."""
        path = self._loader().settings.env.get("PATH", "")
        return any(shutil.which(name.strip(), path=path) for name in cmd.split("|"))

    def strip_empty_entries(self, args: Sequence[str]) -> list[str]:
        """The arguments without the empty ones."""
        return [arg for arg in args if arg]

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Never: no part of this distribution is for ROCm."""
        return False


class CUDAOpBuilder(OpBuilder):
    """An op with GPU code."""

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """The ``-gencode`` flags of the targets that building this op ahead of time would have, in numeric order.

        Args:
            cross_compile_archs: an arch list; default ``TORCH_CUDA_ARCH_LIST``, else the shipped set.

        Raises:
            ArchListError: the list names something unknown.
        """
        settings = self._settings if self._settings is not None else Settings.read()
        return [target.gencode for target in self._targets(settings, cross_compile_archs)]


class TorchCPUOpBuilder(CUDAOpBuilder):
    """An op that runs on the CPU. The base class is DeepSpeed's; it links no CUDA library."""


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """Release of the nvcc found first.

    Args:
        name: what asks, for the message.

    Raises:
        MissingCUDAException: there is none.
    """
    from .host import detect
    from .toolchain import discover_gpu

    settings = Settings.read()
    found = discover_gpu(settings, detect(settings.env))
    if found.nvcc:
        return found.nvcc[0].version
    why = "; ".join(f"{p.what}: {p.why}" for p in found.problems) or "neither CUDA_HOME nor PATH leads to one"
    what = f"no nvcc was found{f' for {name}' if name else ''}"
    raise MissingCUDAException(what, why, "set CUDA_HOME to a toolkit; GPU code itself needs NVRTC only")


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """Always True: a GPU part depends on the driver and the device, and not on torch's CUDA release."""
    return True


def get_default_compute_capabilities() -> str:
    """The architectures built ahead of time where nothing else is asked for, as an arch list."""
    from .targets import ship_set

    return ";".join(target.list_entry for target, _ in ship_set() if target.kind == "sass")


def _make(spec: OpSpec) -> type[OpBuilder]:
    base = CUDAOpBuilder if spec.device else TorchCPUOpBuilder if spec.host else OpBuilder
    body = {
        "__doc__": f"{spec.summary}.",
        "__module__": __name__,
        "SPEC": spec,
        "BUILD_VAR": spec.env_var,
        "NAME": spec.name,
    }
    return type(spec.builder, (base,), body)


#: Builder classes by class name.
ALL_BUILDERS: dict[str, type[OpBuilder]] = {spec.builder: _make(spec) for spec in all_specs().values()}
globals().update(ALL_BUILDERS)

#: One builder per op, by op name.
ALL_OPS: dict[str, OpBuilder] = {cls.NAME: cls() for cls in ALL_BUILDERS.values()}


def builder_closure(member_name: str) -> type[OpBuilder]:
    """The builder class of that name.

    Raises:
        AttributeError: there is none.
    """
    if member_name not in ALL_BUILDERS:
        raise AttributeError(f"no builder is named {member_name!r}; there are {', '.join(ALL_BUILDERS)}")
    return ALL_BUILDERS[member_name]


__all__ = [
    "ALL_BUILDERS",
    "ALL_OPS",
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "TorchCPUOpBuilder",
    "assert_no_cuda_mismatch",
    "builder_closure",
    "get_default_compute_capabilities",
    "installed_cuda_version",
    *ALL_BUILDERS,
]
