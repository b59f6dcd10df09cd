"""From an op's name to its loaded code: search, resolve, build if need be, verify, load; the chain goes on at failures.

What a process has loaded lives in one place, whatever name this package was imported under, so that a library is
loaded once and an image is read once.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import errors, faults
from .commands import Problem
from .errors import CorruptPart, DriverError, LoadFailed, OpsError
from .host import HostFacts
from .marks import DIED, Marks
from .process import ProcessState, check_python, platform_facts, process_state
from .resolve import PTX, Accepted, Resolution, Want, resolve
from .settings import Settings
from .sources import ffi_abi, source_digest
from .spec import OpSpec, get_spec
from .store import Part, jit_store, search, verify

if TYPE_CHECKING:  # slow to import, and a host library found ready needs none of it
    from .gpus import Device
    from .toolchain import Toolchain

log = logging.getLogger("deepspeed_ops")

HOME = Path(__file__).resolve().parent.parent
# What C++ host code asks by name: the image for a device, and another one where the driver refused that.
IMAGE_FUNCTION, REFUSE_FUNCTION = "deepspeed_ops.device_image", "deepspeed_ops.refuse_image"
# CUDA's names of errors that another image may not have; all others (out of memory, say) would meet any image.
_ABOUT_THE_IMAGE = re.compile(r"CUDA_ERROR_\w*(IMAGE|BINARY|PTX|JIT|SOURCE|SYMBOL|DEVSIDE|NOT_FOUND)")
_ADDON_SWITCH = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


class Loader:
    """Loads ops for one home and one set of settings into one state.

    Args:
        settings: default: the environment now.
        home: the checkout or installed package.
        state: default: the process's.
        spec_of: gives an op's spec.
        host: default: this machine.
        progress: told one line per part that has to be built.
        tools: gives the host and the GPU toolchain; only asked where no prebuilt part fits.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        home: Path = HOME,
        state: ProcessState | None = None,
        spec_of: Callable[[str], OpSpec] = get_spec,
        host: HostFacts | None = None,
        progress: Callable[[str], None] | None = None,
        tools: Callable[[Settings, HostFacts, str], Toolchain] | None = None,
    ) -> None:
        self.settings = Settings.read() if settings is None else settings
        self.home, self.spec_of, self.progress = home, spec_of, progress
        self.state = process_state() if state is None else state
        self.host = platform_facts() if host is None else host
        self._tools = tools or _discover
        self._found: dict[str, Toolchain] = {}
        self.stores = search(self.settings, home)

    # --- the two things a process asks for ---

    def host_module(self, op: str) -> Any:
        """The op's host library as a ``tvm_ffi.Module``: found, else built."""
        check_python(self.state)
        with self.state.op_lock(op):
            if op not in self.state.modules:
                spec, ffi = self.spec_of(op), import_ffi()
                if not spec.host:
                    raise LoadFailed(f"op {op} has no host library", "it is Python only", f"import {spec.face}")
                want = self._want(spec, "host", ffi_abi(ffi.__version__))
                if spec.needs:
                    importlib.import_module(".libraries", __package__).preload(spec.needs)
                self.state.modules[op] = self._first_that_opens(
                    spec, None, self.host, want, lambda part, marks: self._open_library(part, marks, ffi)
                )
            return self.state.modules[op]

    def device_image(self, op: str, device: Device, driver_cuda: tuple[int, int]) -> bytes:
        """The op's GPU part for one device: found, else built. PTX ends with the NUL that the driver expects."""
        with self.state.op_lock(op):
            if (op, device.ordinal) not in self.state.images:
                spec = self.spec_of(op)
                host = self._with_driver(driver_cuda)
                want = self._want(spec, "device", "")
                image = self._first_that_opens(spec, device, host, want, _read_image)
                self.state.images[op, device.ordinal] = image
                self.state.image_devices[op, device.ordinal] = (device, driver_cuda)
            return self.state.images[op, device.ordinal]

    def refuse_image(self, op: str, ordinal: int, why: str) -> None:
        """Quarantine the image handed out for a device, which the driver refused; the next call gives another one.

        Raises:
            DriverError: what the driver says is not about the image (out of memory, a lost device).
        """
        if not _ABOUT_THE_IMAGE.search(why):
            raise DriverError(f"GPU {ordinal} cannot load op {op}", why)
        with self.state.op_lock(op):
            image = self.state.images.pop((op, ordinal), None)
            if image is None:
                return
            device, driver_cuda = self.state.image_devices[op, ordinal]
            marks = self._marks(device, self._with_driver(driver_cuda))
            for content in (image, image[:-1]):  # PTX was handed out with one more byte than its file has
                marks.quarantine(hashlib.sha256(content).hexdigest(), why)

    # --- deciding ---

    def resolution(
        self, op: str, device: Device | None = None, driver_cuda: tuple[int, int] | None = None, *, looked: bool = True
    ) -> Resolution:
        """What would be chosen now, with the whole trace; builds and loads nothing. ``looked``: also for compilers."""
        spec = self.spec_of(op)
        host = self._with_driver(driver_cuda)
        abi = ffi_abi(installed_ffi_version()) if device is None else ""
        want = self._want(spec, "host" if device is None else "device", abi)
        return self._resolve(spec, device, host, want, self._marks(device, host), looked)

    def quarantine(self, part: Part, why: str) -> None:
        """Never offer a host library again on this machine."""
        self._marks(None, self.host).quarantine(part.manifest.sha256, why)

    def _with_driver(self, cuda: tuple[int, int] | None) -> HostFacts:
        if cuda is None:
            return self.host
        from .gpus import Driver

        return replace(self.host, driver=Driver("", cuda))

    def _want(self, spec: OpSpec, kind: str, abi: str) -> Want:
        key = (str(self.home), f"{spec.name}:{kind}:{abi}")
        if key not in self.state.digests:
            self.state.digests[key] = source_digest(spec, kind, self.home / "csrc", abi)
        user_flags = self.settings.user_flags if kind == "host" else ()
        return Want(self.state.digests[key], abi, user_flags, self.settings.jit)

    def _resolve(
        self, spec: OpSpec, device: Device | None, host: HostFacts, want: Want, marks: Marks, looked: bool
    ) -> Resolution:
        parts = [p for store in self.stores for p in store.parts(spec.name)]
        known = {p.manifest.sha256 for p in parts if isinstance(p, Part)}
        quarantined = {s: why for s in known if (why := marks.quarantined(s)) is not None}
        toolchain = self._toolchain(host, "host" if device is None else "device") if looked else None
        return resolve(spec, host, device, parts, toolchain, replace(want, quarantined=quarantined))

    def _marks(self, device: Device | None, host: HostFacts) -> Marks:
        # Verdicts on a host library do not depend on the driver.
        root = next((s.root for s in self.stores if s.origin == "jit"), None)
        libc = ".".join(map(str, self.host.libc_version))
        cuda = host.driver.cuda if device is not None and host.driver is not None else None
        return Marks(root, f"ffi {installed_ffi_version()}, libc {libc}, driver {cuda}", self.state.refused)

    def _first_that_opens(
        self, spec: OpSpec, device: Device | None, host: HostFacts, want: Want, open_part: Callable[[Part, Marks], Any]
    ) -> Any:
        """Try candidates best first until one opens; compilers are looked for only when nothing found will do."""
        marks, corrupt = self._marks(device, host), dict(want.corrupt)
        for looked in (False, True):
            resolution = self._resolve(spec, device, host, replace(want, corrupt=corrupt), marks, looked)
            failures: list[OpsError] = []
            for verdict in resolution.trace:
                if not isinstance(verdict, Accepted) or (verdict.rank == PTX and not looked and want.jit):
                    continue  # PTX is worse than a part built here: first see whether one can be
                try:
                    return open_part(verdict.part or self._build(spec, verdict), marks)
                except OpsError as exc:
                    failures.append(exc)
                    if isinstance(exc, CorruptPart) and verdict.part is not None:
                        corrupt[verdict.part.path] = exc.why
                    log.warning("%s: %s", spec.name, exc)
        # The second resolution knows what became of the first one's candidates: its trace tells all of it.
        if not failures:
            raise resolution.error()
        if isinstance(failures[0], LoadFailed | CorruptPart):
            why = f"{failures[0].why}\n{resolution.explain()}"
            raise LoadFailed(f"op {spec.name}: no part could be loaded", why, failures[0].fix) from failures[0]
        raise failures[0]

    def _build(self, spec: OpSpec, accepted: Accepted) -> Part:
        # Imported here: a process that finds its parts never pays for the rooms that make them.
        from .compile import build_part
        from .plan import package_version, plan_device, plan_host
        from .toolchain import HostCompiler

        csrc, version, ninja = self.home / "csrc", package_version(self.home), None
        if accepted.target is None or accepted.compiler is None or isinstance(accepted.compiler, HostCompiler):
            tools = self._toolchain(self.host, "host")
            plan, ninja = plan_host(spec, tools, self.settings, self.host, csrc, version), tools.ninja
        else:
            plan = plan_device(spec, accepted.target, accepted.compiler, csrc, version)
        return build_part(plan, jit_store(self.settings), self.settings, self.progress, ninja)

    def _toolchain(self, host: HostFacts, side: str) -> Toolchain:
        if side not in self._found:
            self._found[side] = self._tools(self.settings, host, side)
        return self._found[side]

    # --- opening ---

    def _open_library(self, part: Part, marks: Marks, ffi: Any) -> Any:
        sha256 = part.manifest.sha256
        verify(part)
        if (why := marks.quarantined(sha256)) is not None:  # built again from the same inputs, it is the same part
            raise LoadFailed(f"{part.path} is quarantined", why, "")
        with marks.first_use(sha256) as verdict:
            if verdict == DIED:
                from .compile import loads_in_child

                if why := loads_in_child(part.path, self.settings):
                    raise self._refuse(part, marks, f"a process died while loading it, and {why}")
            try:
                return ffi.load_module(str(part.path))
            except Exception as exc:
                raise self._refuse(part, marks, f"{type(exc).__name__}: {exc}") from exc

    def _refuse(self, part: Part, marks: Marks, why: str) -> LoadFailed:
        if "failed to map segment from shared object" in why:  # the same part loads from elsewhere
            problem = faults.part_on_noexec_mount(str(part.path), why)
            return LoadFailed(problem.what, problem.why, problem.fix)
        marks.quarantine(part.manifest.sha256, why)
        return LoadFailed(f"{part.path} does not load", why, "")


def _read_image(part: Part, marks: Marks) -> bytes:
    verify(part)
    if (why := marks.quarantined(part.manifest.sha256)) is not None:
        raise LoadFailed(f"{part.path} is quarantined", why, "")
    try:
        data = part.path.read_bytes()
    except OSError as exc:
        raise CorruptPart(f"part {part.path} cannot be read", str(exc)) from exc
    return data if data[:4] == b"\x7fELF" else data + b"\0"


def _discover(settings: Settings, host: HostFacts, side: str) -> Toolchain:
    from .toolchain import discover_gpu, discover_host

    return discover_host(settings, host) if side == "host" else discover_gpu(settings, host)


# --- the FFI ------------------------------------------------------------------------------------------------------


def installed_ffi_version() -> str:
    """Version of apache-tvm-ffi, without importing it where nobody did yet."""
    module = sys.modules.get("tvm_ffi")
    if module is not None:
        return str(module.__version__)
    import importlib.metadata

    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError as exc:
        raise _no_ffi(exc) from exc


def _no_ffi(exc: BaseException) -> LoadFailed:
    if isinstance(exc, ImportError) and "core" in str(exc) and (problem := _foreign_ffi()):
        return LoadFailed(problem.what, f"{problem.why} ({exc})", problem.fix)
    return LoadFailed("apache-tvm-ffi cannot be imported", f"{type(exc).__name__}: {exc}", "pip install apache-tvm-ffi")


def _foreign_ffi(paths: list[str] | None = None, suffixes: Sequence[str] = EXTENSION_SUFFIXES) -> Problem | None:
    """Whether the package on ``sys.path`` was installed for another Python: its compiled module has other suffixes."""
    spec = PathFinder.find_spec("tvm_ffi", paths)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(p.name for p in Path(place).glob("core.*") if p.suffix in (".pyd", ".so"))
        if not any(name == f"core{suffix}" for name in found for suffix in suffixes):
            return faults.ffi_of_another_python(found, suffixes[0])
    return None


def import_ffi() -> Any:
    """Import TVM-FFI, once with its torch add-on switched off, and give it the function that serves GPU parts.

    On a torch without the DLPack exchange API the import would compile that add-on in a subprocess.

    Raises:
        LoadFailed: it is not installed, or does not import.
    """
    state = process_state()
    with state.lock:
        if not state.ffi_ready:
            try:
                if "tvm_ffi" in sys.modules or _torch_exchanges():
                    ffi = importlib.import_module("tvm_ffi")
                else:
                    ffi = _import_without_addon()
            except (ImportError, OSError, RuntimeError) as exc:
                raise _no_ffi(exc) from exc
            _register(ffi)
            state.ffi_ready = True
        return importlib.import_module("tvm_ffi")


def _torch_exchanges() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(getattr(torch, "Tensor", None), "__dlpack_c_exchange_api__")


def _import_without_addon() -> Any:
    before = os.environ.get(_ADDON_SWITCH)
    os.environ[_ADDON_SWITCH] = "1"
    try:
        return importlib.import_module("tvm_ffi")
    finally:
        if before is None:
            del os.environ[_ADDON_SWITCH]
        else:
            os.environ[_ADDON_SWITCH] = before


def _register(ffi: Any) -> None:
    """What C++ host code calls back, and the error classes that keep their names on the way through it."""
    for name, item in vars(errors).items():
        if isinstance(item, type) and issubclass(item, OpsError):
            ffi.register_error(name, item)

    def image(op: str, ordinal: int, major: int, minor: int, driver_cuda: int, tegra: bool) -> bytes:
        cuda = (driver_cuda // 1000, driver_cuda % 1000 // 10)
        return device_image(op, ordinal, (major, minor), cuda, tegra=bool(tegra))

    ffi.register_global_func(IMAGE_FUNCTION, image, override=True)
    ffi.register_global_func(REFUSE_FUNCTION, refuse_image, override=True)


# --- what the rest of the package calls ----------------------------------------------------------------------------


def host_module(op: str) -> Any:
    """The op's host library as a ``tvm_ffi.Module``: found in a store, else built; loaded once per process.

    Raises:
        OpsError: no part fits and none can be built; the error says what was looked at and what to do.
    """
    found = process_state().modules.get(op)
    return found if found is not None else Loader().host_module(op)


def device_image(
    op: str,
    ordinal: int,
    capability: tuple[int, int] | None = None,
    driver_cuda: tuple[int, int] | None = None,
    *,
    tegra: bool = False,
    name: str = "",
) -> bytes:
    """The op's GPU code for one device, as the driver takes it; read or built once per process and device.

    Args:
        op: name of the op.
        ordinal: CUDA's number of the device.
        capability: its compute capability; asked of the driver where it or ``driver_cuda`` is not given.
        driver_cuda: CUDA version of the driver.
        tegra: a system-on-chip.
        name: of the device, for messages.

    Raises:
        OpsError: no part fits and none can be built.
    """
    found = process_state().images.get((op, ordinal))
    if found is not None:
        return found
    from .gpus import Device

    if capability is None or driver_cuda is None:
        from .driver import Driver

        cuda = Driver.open()
        facts = cuda.device(ordinal)
        capability, driver_cuda = facts.capability, cuda.version
        tegra = tegra or facts.integrated

    return Loader().device_image(op, Device(ordinal, "", name, capability, 0, tegra), driver_cuda)


def refuse_image(op: str, ordinal: int, why: str) -> None:
    """Tell that the driver refused the image handed out last for a device; the next :func:`device_image` differs."""
    Loader().refuse_image(op, ordinal, why)
