"""The CUDA *driver* API by ctypes: loads an op's GPU part and launches its kernels without any C++ compiler.

Host libraries have a launcher of their own in C++. This room serves hosts where none could be built or found, so that a
machine with a GPU, a driver and NVRTC needs nothing else. The library is opened at first use, never at import.

Every function takes the driver's library as an object, so a test gives one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import DriverError
from .faults import no_gpu_driver

_LIBRARIES = {
    "win32": ("nvcuda.dll",),
    # WSL keeps the Windows driver's library outside the loader's path.
    "linux": ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"),
}
_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CUdevice_attribute
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_OPT_IN_ABOVE = 48 * 1024  # bytes of dynamic shared memory a kernel gets without asking
_FLOOR = (12, 0)  # cuLibrary* came with driver 525
_FIX = "install NVIDIA driver 525 or newer"

_Pointer = ctypes.c_void_p
_U = ctypes.c_uint
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_Pointer,),
    "cuDeviceGetCount": (_Pointer,),
    "cuDeviceGet": (_Pointer, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_Pointer, ctypes.c_int),
    "cuDeviceGetAttribute": (_Pointer, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_Pointer, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_Pointer,),
    "cuCtxPopCurrent_v2": (_Pointer,),
    "cuLibraryLoadData": (_Pointer, _Pointer, _Pointer, _Pointer, _U, _Pointer, _Pointer, _U),
    "cuLibraryGetKernel": (_Pointer, _Pointer, ctypes.c_char_p),
    "cuKernelGetFunction": (_Pointer, _Pointer),
    "cuFuncSetAttribute": (_Pointer, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernel": (_Pointer, _U, _U, _U, _U, _U, _U, _U, _Pointer, _Pointer, _Pointer),
    "cuGetErrorName": (ctypes.c_int, _Pointer),
}


@dataclass(frozen=True)
class DriverDevice:
    """A device as the driver counts it (``CUDA_VISIBLE_DEVICES`` applied)."""

    ordinal: int
    handle: int
    uuid: str
    capability: tuple[int, int]
    integrated: bool


class Driver:
    """The driver, initialised.

    Args:
        library: ``libcuda`` as ctypes opens it, or an object with the same functions.

    Raises:
        DriverError: it cannot be initialised, or is older than 525.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self.call("cuInit", 0)
        version = ctypes.c_int(0)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)
        if self.version < _FLOOR:
            found = f"this driver supports CUDA {self.version[0]}.{self.version[1]}"
            raise DriverError("the GPU driver is too old", f"expected CUDA 12.0 or newer; {found}", _FIX)

    @classmethod
    def open(cls, load: Callable[[str], Any] | None = None, system: str = sys.platform) -> Driver:
        """Open this machine's driver.

        Args:
            load: opens a library by name; default: ctypes.
            system: ``sys.platform`` of the machine.

        Raises:
            DriverError: there is none.
        """
        loader: Callable[[str], Any] = load if load is not None else getattr(ctypes, "WinDLL", ctypes.CDLL)
        tried = []
        for name in _LIBRARIES.get(system, ()):
            try:
                return cls(loader(name))
            except OSError as exc:
                tried.append(f"{name}: {exc}")
        problem = no_gpu_driver(system, tried)
        raise DriverError(problem.what, problem.why, problem.fix)

    def call(self, name: str, *args: Any) -> None:
        """Call a driver function.

        Raises:
            DriverError: it returned an error, or this driver has no such function.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"the GPU driver has no {name}", "it is older than 525", _FIX)
        function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
        status = function(*args)
        if status != 0:
            raise DriverError(f"{name} failed: {self._error_name(status)}", f"the driver returned {status}", "")

    def _error_name(self, status: int) -> str:
        text = ctypes.c_char_p()
        function = self._library.cuGetErrorName
        function.argtypes, function.restype = _SIGNATURES["cuGetErrorName"], ctypes.c_int
        if function(status, ctypes.byref(text)) == 0 and text.value:
            return text.value.decode("ascii", "replace")
        return f"CUDA error {status}"

    def count(self) -> int:
        """Number of devices this process sees."""
        number = ctypes.c_int(0)
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def device(self, ordinal: int) -> DriverDevice:
        """Facts of a device; makes no context.

        Raises:
            DriverError: no device has that ordinal.
        """
        count = self.count()
        if not 0 <= ordinal < count:
            raise DriverError(f"no GPU {ordinal}", f"the driver counts {count}", "check CUDA_VISIBLE_DEVICES")
        handle = ctypes.c_int(0)
        self.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        uuid = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), handle.value)
        text = bytes(uuid).hex()
        dashed = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        capability = (self._attribute(_MAJOR, handle.value), self._attribute(_MINOR, handle.value))
        integrated = self._attribute(_INTEGRATED, handle.value) != 0
        return DriverDevice(ordinal, handle.value, f"GPU-{dashed}", capability, integrated)

    def _attribute(self, attribute: int, handle: int) -> int:
        value = ctypes.c_int(0)
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value

    @contextlib.contextmanager
    def primary_context(self, handle: int) -> Iterator[None]:
        """Make the device's primary context, the one torch uses, current for a while.

        It is retained once and kept: the process ends with it, as torch's own does.
        """
        with self._lock:
            if handle not in self._contexts:
                context = ctypes.c_void_p()
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[handle] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[handle])
        try:
            yield
        finally:
            popped = ctypes.c_void_p()
            self.call("cuCtxPopCurrent_v2", ctypes.byref(popped))


class Kernels:
    """The kernels of one GPU part on one device, loaded before any launch so that a stream capture meets no loading.

    Args:
        image: a cubin, or PTX with its final NUL.
        ordinal: the device.
        names: entry points to load now; others are loaded at their first launch.
        driver: default: this machine's.

    Raises:
        DriverError: the driver refuses the image or lacks a kernel.

    Example:
        ``Kernels(device_image("fused_adam", 0), 0).launch("scale", (8, 1, 1), (256, 1, 1), 0, stream, [c_float(2.0)])``
    """

    def __init__(self, image: bytes, ordinal: int, names: Sequence[str] = (), driver: Driver | None = None) -> None:
        self._driver = driver if driver is not None else Driver.open()
        self.device = self._driver.device(ordinal)
        self._image = image  # the driver copies it, some releases only at the first kernel
        self._library = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._shared: dict[str, int] = {}
        self._lock = threading.Lock()
        with self._driver.primary_context(self.device.handle):
            code = ctypes.cast(ctypes.c_char_p(image), ctypes.c_void_p)
            self._driver.call("cuLibraryLoadData", ctypes.byref(self._library), code, None, None, 0, None, None, 0)
            for name in names:
                self._function(name)

    def _function(self, name: str) -> ctypes.c_void_p:
        """The kernel's handle in the current context."""
        with self._lock:
            if name not in self._functions:
                kernel, function = ctypes.c_void_p(), ctypes.c_void_p()
                self._driver.call("cuLibraryGetKernel", ctypes.byref(kernel), self._library, name.encode())
                self._driver.call("cuKernelGetFunction", ctypes.byref(function), kernel)
                self._functions[name] = function
            return self._functions[name]

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        args: Sequence[Any],
    ) -> None:
        """Launch a kernel; a grid with a zero in it launches nothing. Does not wait.

        Args:
            name: the ``extern "C"`` entry point.
            grid: blocks in x, y, z.
            block: threads in x, y, z.
            shared_bytes: dynamic shared memory per block, in bytes.
            stream: ``CUstream`` as an integer, 0 for the default stream.
            args: one ctypes value per parameter, of exactly the parameter's size.

        Raises:
            DriverError: the driver refused it, with CUDA's own name of the error.
        """
        if 0 in grid:
            return
        with self._driver.primary_context(self.device.handle):
            function = self._function(name)
            if shared_bytes > max(_OPT_IN_ABOVE, self._shared.get(name, 0)):
                self._driver.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
                self._shared[name] = shared_bytes
            pointers = (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(a) for a in args))
            self._driver.call(
                "cuLaunchKernel",
                function,
                *grid,
                *block,
                shared_bytes,
                ctypes.c_void_p(stream),
                ctypes.cast(pointers, ctypes.c_void_p),
                None,
            )
