"""The driver binding on a real GPU: a toy kernel is built for the device, loaded and launched, without any g++."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from op_builder.driver import Driver, Kernels
from op_builder.errors import DriverError
from op_builder.gpus import Device
from op_builder.loader import Loader
from op_builder.process import ProcessState
from op_builder.settings import Settings
from op_builder.toolchain import discover_gpu
from tests.toys import toy_home, toy_spec


@pytest.mark.gpu
def test_a_toy_kernel_runs_on_the_device(tmp_path: Path) -> None:
    """Fault: everything about the driver holds for a fake library only."""
    try:
        driver = Driver.open()
        facts = driver.device(0)
    except DriverError as exc:
        pytest.skip(f"missing: a CUDA device ({exc.what})")
    settings = Settings.read({**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit")})
    loader = Loader(
        settings,
        home=toy_home(tmp_path / "home"),
        state=ProcessState(),
        spec_of=lambda _: toy_spec(device=["toy/toy.cu"], kernels=["toy_scale"]),
    )
    found = discover_gpu(settings, loader.host)
    if not found.nvrtc and not found.nvcc:
        pytest.skip("missing: NVRTC and nvcc")
    device = Device(0, facts.uuid, "", facts.capability, 0, facts.integrated)
    image = loader.device_image("toy", device, driver.version)
    kernels = Kernels(image, 0, ["toy_scale"], driver)

    count, library = 1000, ctypes.CDLL("libcuda.so.1")
    values = (ctypes.c_float * count)(*range(count))
    memory = ctypes.c_uint64()
    with driver.primary_context(facts.handle):
        assert library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 * count)) == 0
        assert library.cuMemcpyHtoD_v2(memory, values, ctypes.c_size_t(4 * count)) == 0
        arguments = [memory, ctypes.c_float(2.5), ctypes.c_int(count)]
        kernels.launch("toy_scale", (4, 1, 1), (256, 1, 1), 0, 0, arguments)
        assert library.cuMemcpyDtoH_v2(values, memory, ctypes.c_size_t(4 * count)) == 0
        assert library.cuMemFree_v2(memory) == 0
    assert list(values) == [2.5 * i for i in range(count)]
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_FOUND"):
        kernels.launch("no_such_kernel", (1, 1, 1), (1, 1, 1), 0, 0, [])
