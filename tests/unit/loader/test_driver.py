"""Guards against driver calls of the wrong shape, errors without a name, and contexts that are not torch's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from op_builder.driver import Driver, Kernels
from op_builder.errors import DriverError


class FakeCuda:
    """A driver with two devices that records its calls."""

    def __init__(self, version: int = 12040, fail: dict[str, int] | None = None, absent: tuple[str, ...] = ()) -> None:
        self.version, self.fail, self.absent = version, fail or {}, absent
        self.calls: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        self.image = b""
        self.shared: list[int] = []
        self.depth = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name in self.absent:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name]
            handler = getattr(type(self), f"on_{name}", None)
            if handler is not None:
                handler(self, *args)
            return 0

        return call

    def on_cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = self.version

    def on_cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = 2

    def on_cuDeviceGet(self, out: Any, ordinal: int) -> None:
        out._obj.value = ordinal + 10

    def on_cuDeviceGetUuid_v2(self, out: Any, handle: int) -> None:
        for i in range(16):
            out._obj[i] = i

    def on_cuDeviceGetAttribute(self, out: Any, attribute: int, handle: int) -> None:
        out._obj.value = {75: 9, 76: 0, 18: handle - 10}[attribute]

    def on_cuDevicePrimaryCtxRetain(self, out: Any, handle: int) -> None:
        out._obj.value = 100 + handle

    def on_cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.depth += 1

    def on_cuCtxPopCurrent_v2(self, out: Any) -> None:
        self.depth -= 1

    def on_cuLibraryLoadData(self, out: Any, code: Any, *rest: Any) -> None:
        assert self.depth == 1
        self.image = ctypes.string_at(code.value)
        out._obj.value = 7

    def on_cuLibraryGetKernel(self, out: Any, library: Any, name: bytes) -> None:
        assert library.value == 7
        out._obj.value = 1000 + len(name)

    def on_cuKernelGetFunction(self, out: Any, kernel: Any) -> None:
        out._obj.value = kernel.value + 1

    def on_cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:
        assert attribute == 8
        self.shared.append(value)

    def on_cuLaunchKernel(self, function: Any, *args: Any) -> None:
        assert self.depth == 1
        *sizes, stream, parameters, extra = args
        assert extra is None
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        first = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_float))[0]
        self.launched.append((function.value, tuple(sizes), stream.value, first))

    def on_cuGetErrorName(self, status: int, out: Any) -> None:
        if status == 209:
            out._obj.value = b"CUDA_ERROR_NO_BINARY_FOR_GPU"


def test_a_launch_reaches_the_driver_with_its_arguments_in_the_primary_context() -> None:
    """Fault: a wrong argument order; a context of our own beside torch's; a context left pushed."""
    fake = FakeCuda()
    kernels = Kernels(b"\x7fELF image", 0, ["scale"], Driver(fake))
    assert fake.image == b"\x7fELF image"
    loaded = len(fake.calls)
    kernels.launch("scale", (8, 1, 1), (256, 2, 1), 0, 5, [ctypes.c_float(2.5), ctypes.c_int(3)])
    assert fake.launched == [(1006, (8, 1, 1, 256, 2, 1, 0), 5, 2.5)]
    assert fake.depth == 0
    assert fake.calls[loaded:] == ["cuCtxPushCurrent_v2", "cuLaunchKernel", "cuCtxPopCurrent_v2"]
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert not [name for name in fake.calls if "CtxCreate" in name or "Synchronize" in name or "Alloc" in name]


def test_device_facts() -> None:
    """Fault: a device matched by the wrong name; a system-on-chip taken for a desktop part."""
    driver = Driver(FakeCuda())
    assert driver.version == (12, 4) and driver.count() == 2
    device = driver.device(1)
    assert (device.uuid, device.capability, device.integrated) == (
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        (9, 0),
        True,
    )
    assert not driver.device(0).integrated
    with pytest.raises(DriverError, match="no GPU 2"):
        driver.device(2)


def test_large_shared_memory_is_opted_into_once_per_size() -> None:
    """Fault: a kernel with more than 48 KB refused; the attribute set at every launch."""
    fake = FakeCuda()
    kernels = Kernels(b"x", 0, driver=Driver(fake))
    for size in (48 * 1024, 96 * 1024, 64 * 1024, 96 * 1024, 100 * 1024):
        kernels.launch("scale", (1, 1, 1), (1, 1, 1), size, 0, [ctypes.c_float(0)])
    assert fake.shared == [96 * 1024, 100 * 1024]


def test_an_empty_grid_launches_nothing() -> None:
    """Fault (empty tensor): CUDA_ERROR_INVALID_VALUE for zero elements."""
    fake = FakeCuda()
    Kernels(b"x", 0, driver=Driver(fake)).launch("scale", (0, 1, 1), (1, 1, 1), 0, 0, [])
    assert fake.launched == []


def test_a_driver_error_has_cudas_name_and_leaves_no_context() -> None:
    """Fault: "error 209"; or every later launch of the process in the wrong context."""
    fake = FakeCuda(fail={"cuLibraryLoadData": 209})
    with pytest.raises(DriverError, match="cuLibraryLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        Kernels(b"x", 0, driver=Driver(fake))
    assert fake.depth == 0
    fake = FakeCuda(fail={"cuLaunchKernel": 77})
    kernels = Kernels(b"x", 0, driver=Driver(fake))
    with pytest.raises(DriverError, match="CUDA error 77"):
        kernels.launch("scale", (1, 1, 1), (1, 1, 1), 0, 0, [ctypes.c_float(0)])
    assert fake.depth == 0


def test_an_old_or_absent_driver_is_told_as_such() -> None:
    """Fault: AttributeError for a missing function; OSError for a missing library; on macOS anything at all."""
    with pytest.raises(DriverError, match="too old") as err:
        Driver(FakeCuda(version=11080))
    assert "525" in err.value.fix
    with pytest.raises(DriverError, match="has no cuLibraryLoadData"):
        Kernels(b"x", 0, driver=Driver(FakeCuda(absent=("cuLibraryLoadData",))))

    def nothing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(DriverError, match="no GPU driver") as err:
        Driver.open(nothing, "linux")
    assert "libcuda.so.1" in err.value.why and "/usr/lib/wsl/lib" in err.value.why
    with pytest.raises(DriverError, match="no GPU driver"):
        Driver.open(nothing, "darwin")


def test_wsl_and_windows_names() -> None:
    """Fault: a driver outside the loader's path is not found."""
    opened: list[str] = []

    def only_wsl(name: str) -> Any:
        opened.append(name)
        if "wsl" in name or name == "nvcuda.dll":
            return FakeCuda()
        raise OSError(name)

    assert Driver.open(only_wsl, "linux").version == (12, 4)
    assert Driver.open(only_wsl, "win32").version == (12, 4)
    assert opened == ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "nvcuda.dll"]
