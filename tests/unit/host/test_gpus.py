"""GPUs through a fake NVML: order, visibility, MIG, and why there are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from op_builder.gpus import Driver, driver_without_nvml, is_jetson, read_gpus, why_no_nvml


@dataclass
class Gpu:
    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 150 << 30
    pci: str = "00000000:01:00.0"
    cores: int = 1000
    mig: list[str] | None = None
    lost: bool = False


@dataclass
class FakeNvml:
    """The calls of pynvml that are used, on a list of GPUs."""

    gpus: list[Gpu]
    driver: str | bytes = "580.159.04"
    cuda: int | None = 13000
    calls: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if self.cuda is None:
            raise RuntimeError("Function Not Found")
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].lost:
            raise RuntimeError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Gpu | str) -> str | bytes:
        return handle if isinstance(handle, str) else handle.uuid.encode()

    def nvmlDeviceGetName(self, handle: Gpu) -> bytes:
        return handle.name.encode()

    def nvmlDeviceGetCudaComputeCapability(self, handle: Gpu) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu | str) -> SimpleNamespace:
        return SimpleNamespace(total=10 << 30 if isinstance(handle, str) else handle.memory)

    def nvmlDeviceGetPciInfo(self, handle: Gpu) -> SimpleNamespace:
        return SimpleNamespace(busId=handle.pci.encode())

    def nvmlDeviceGetNumGpuCores(self, handle: Gpu) -> int:
        return handle.cores

    def nvmlDeviceGetMaxClockInfo(self, handle: Gpu, clock: int) -> int:
        return 1980

    def nvmlDeviceGetMigMode(self, handle: Gpu) -> tuple[int, int]:
        if handle.mig is None:
            raise RuntimeError("Not Supported")
        return (1, 1) if handle.mig else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Gpu, index: int) -> str:
        assert handle.mig is not None
        if index >= len(handle.mig):
            raise RuntimeError("Not Found")
        return handle.mig[index]


def two() -> FakeNvml:
    slow = Gpu("GPU-aaaa-1", "NVIDIA T4", (7, 5), 16 << 30, "00000000:01:00.0", 2560)
    fast = Gpu("GPU-bbbb-2", "NVIDIA A100", (8, 0), 80 << 30, "00000000:41:00.0", 6912)
    return FakeNvml([slow, fast])


def uuids(nvml: FakeNvml, env: dict[str, str], root: Path) -> list[str]:
    return [d.uuid for d in read_gpus(env, root, nvml).devices]


def test_one_gpu(tmp_path: Path) -> None:
    """Fault: bytes of older bindings leak, the CUDA version is read wrongly, the session stays open."""
    nvml = FakeNvml([Gpu("GPU-1")], driver=b"580.159.04")
    found = read_gpus({}, tmp_path, nvml)
    assert found.driver == Driver("580.159.04", (13, 0)) and found.driver.branch == (580, 159, 4)
    (device,) = found.devices
    assert (device.ordinal, device.uuid, device.name, device.capability) == (0, "GPU-1", "NVIDIA H200", (9, 0))
    assert device.memory_bytes == 150 << 30 and not device.tegra and not device.mig
    assert found.certain and found.notes == () and nvml.calls == ["init", "shutdown"]


def test_cuda_version_digits(tmp_path: Path) -> None:
    """Fault: 12040 read as CUDA 12.40."""
    driver = read_gpus({}, tmp_path, FakeNvml([], cuda=12040)).driver
    assert driver is not None and driver.cuda == (12, 4)


def test_driver_without_cuda_version(tmp_path: Path) -> None:
    """Fault: an old driver that lacks the call hides the GPUs."""
    found = read_gpus({}, tmp_path, FakeNvml([Gpu("GPU-1")], cuda=None))
    assert found.driver is not None and found.driver.cuda is None and len(found.devices) == 1
    assert "CUDA version" in found.notes[0]


def test_a_lost_gpu_hides_no_other(tmp_path: Path) -> None:
    """Fault: one GPU fallen off the bus disables all."""
    found = read_gpus({}, tmp_path, FakeNvml([Gpu("GPU-1", lost=True), Gpu("GPU-2")]))
    assert [d.uuid for d in found.devices] == ["GPU-2"] and "GPU 0" in found.notes[0]


def test_order_among_unlike_gpus(tmp_path: Path) -> None:
    """Fault: NVML's PCI order taken for CUDA's, so that the T4's code is built for ordinal 0, the A100."""
    assert uuids(two(), {}, tmp_path) == ["GPU-bbbb-2", "GPU-aaaa-1"]
    assert not read_gpus({}, tmp_path, two()).certain
    pci = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert uuids(two(), pci, tmp_path) == ["GPU-aaaa-1", "GPU-bbbb-2"]
    assert read_gpus(pci, tmp_path, two()).certain


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("0", ["a"]),
        ("1,0", ["b", "a"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["b"]),
        ("0,7,1", ["a"]),
        ("x", []),
        (" 1 , 0 ", ["b", "a"]),
        ("GPU-bbbb", ["b"]),
        ("GPU-aaaa-1,GPU-bbbb-2", ["a", "b"]),
        ("gpu-BBBB", ["b"]),
        ("GPU-", []),
        ("GPU-cccc,0", []),
        ("0,0", ["a"]),
        ("NoDevFiles", []),
        ("²", []),
    ],
)
def test_cuda_visible_devices(choice: str, expected: list[str], tmp_path: Path) -> None:
    """Fault: hidden devices planned for, a UUID prefix or -1 misread, int() of anything."""
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": choice}
    names = {"a": "GPU-aaaa-1", "b": "GPU-bbbb-2"}
    found = read_gpus(env, tmp_path, two())
    assert [d.uuid for d in found.devices] == [names[e] for e in expected]
    assert [d.ordinal for d in found.devices] == list(range(len(expected)))


def test_a_choice_that_names_nothing_is_told(tmp_path: Path) -> None:
    """Fault: no GPU and no word why."""
    env = {"CUDA_VISIBLE_DEVICES": "9"}
    assert any("'9' names no device" in n for n in read_gpus(env, tmp_path, two()).notes)


def test_mig(tmp_path: Path) -> None:
    """Fault: MIG instances unknown; the whole split GPU offered though CUDA will not show it."""
    nvml = FakeNvml([Gpu("GPU-1", mig=["MIG-x1", "MIG-x2"]), Gpu("GPU-2", mig=[], pci="00000000:02:00.0")])
    (first,) = read_gpus({}, tmp_path, nvml).devices
    assert (first.uuid, first.mig, first.capability, first.memory_bytes) == ("MIG-x1", True, (9, 0), 10 << 30)
    (chosen,) = read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-x2"}, tmp_path, nvml).devices
    assert chosen.uuid == "MIG-x2"
    (whole,) = read_gpus({"CUDA_VISIBLE_DEVICES": "GPU-2"}, tmp_path, nvml).devices
    assert not whole.mig
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, tmp_path, nvml).devices == ()


def test_tegra_by_capability(tmp_path: Path) -> None:
    """Fault: Orin (8.7) is offered machine code of desktop Ampere."""
    (device,) = read_gpus({}, tmp_path, FakeNvml([Gpu("GPU-1", "Orin", (8, 7))])).devices
    assert device.tegra


class Broken:
    """An NVML that does not start."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def nvmlInit(self) -> None:
        raise self.error


def test_container_without_utility(tmp_path: Path) -> None:
    """Fault: "no GPU" in a container that has one, without the setting that is missing."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = read_gpus({"NVIDIA_DRIVER_CAPABILITIES": "compute"}, tmp_path, Broken(OSError("NVML Not Found")))
    assert "utility" in found.notes[0] and "compute" in found.notes[0] and "nvidia0" in found.notes[0]


def test_driver_is_known_without_nvml(tmp_path: Path) -> None:
    """Fault: the driver counts as absent because NVML is."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(line, encoding="utf-8")
    assert driver_without_nvml(tmp_path) == Driver("580.159.04", None)
    assert read_gpus({}, tmp_path, Broken(OSError("x"))).driver == Driver("580.159.04", None)
    assert driver_without_nvml(tmp_path / "none") is None


def test_reasons(tmp_path: Path) -> None:
    """Fault: WSL, Jetson, a missing module and a driver updated in place all look alike."""
    assert "nvidia-ml-py" in why_no_nvml(ImportError("pynvml"), {}, tmp_path)[0]
    assert "reboot" in why_no_nvml(RuntimeError("Driver/library version mismatch"), {}, tmp_path)[0]
    assert "KeyError" in why_no_nvml(KeyError(), {}, tmp_path)[0]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert "WSL" in why_no_nvml(OSError("x"), {}, tmp_path)[0]


@pytest.mark.parametrize("path", ["etc/nv_tegra_release", "proc/device-tree/model"])
def test_jetson(tmp_path: Path, path: str) -> None:
    """Fault: Jetson is told to set container capabilities."""
    assert not is_jetson(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("NVIDIA Jetson AGX Orin Developer Kit\0", encoding="utf-8")
    assert is_jetson(tmp_path)
    assert "Jetson" in why_no_nvml(OSError("x"), {}, tmp_path)[0]


@pytest.mark.parametrize("error", [OSError("x"), RuntimeError("y"), ImportError("z"), AttributeError("w")])
def test_never_raises(error: Exception, tmp_path: Path) -> None:
    """Fault: an exception of NVML's binding ends an import or a report."""
    found = read_gpus({}, tmp_path, Broken(error))
    assert found.devices == () and found.notes
