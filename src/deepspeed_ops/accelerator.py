"""DeepSpeed's accelerator handle, as far as code around the ops uses it: device names, builders, availability.

``get_accelerator()`` decides once: ``DS_ACCELERATOR`` if set (``cuda`` or ``cpu``), else ``cuda`` where torch sees a
GPU, else ``cpu``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from deepspeed_ops.op_builder.errors import SettingError

SUPPORTED_ACCELERATOR_LIST = ("cuda", "cpu")
_current: Accelerator | None = None


class Accelerator:
    """One kind of device.

    Args:
        name: ``cuda`` or ``cpu``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._communication_backend_name = "nccl" if name == "cuda" else "gloo"

    def __repr__(self) -> str:
        return f"Accelerator({self._name!r})"

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:1``, ``cpu``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def communication_backend_name(self) -> str:
        """The backend for ``torch.distributed``."""
        return self._communication_backend_name

    def is_available(self) -> bool:
        """Whether torch can use such a device now."""
        return self._name == "cpu" or bool(self._torch().cuda.is_available())

    def is_synchronized_device(self) -> bool:
        """Whether an op has finished when its call returns."""
        return self._name == "cpu"

    def device_count(self) -> int:
        """Number of devices that torch sees; 1 for ``cpu``."""
        return 1 if self._name == "cpu" else int(self._torch().cuda.device_count())

    def current_device(self) -> int:
        """Ordinal of the current device; 0 for ``cpu``."""
        return 0 if self._name == "cpu" else int(self._torch().cuda.current_device())

    def current_device_name(self) -> str:
        """``cuda:<current>`` or ``cpu``."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> Any:
        """A context that makes a device the current one."""
        import contextlib

        return contextlib.nullcontext() if self._name == "cpu" else self._torch().cuda.device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished all its work."""
        if self._name == "cuda":
            self._torch().cuda.synchronize(device_index)

    def on_accelerator(self, tensor: Any) -> bool:
        """Whether ``tensor`` lies on this kind of device."""
        return str(tensor.device).startswith(self._name)

    def is_bf16_supported(self) -> bool:
        """Whether torch computes in bfloat16 there."""
        return self._name == "cpu" or bool(self._torch().cuda.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether torch computes in float16 there."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether the device runs Triton's code (compute capability 8.0 or higher)."""
        return self._name == "cuda" and self.is_available() and self._torch().cuda.get_device_capability()[0] >= 8

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"] if self._name == "cuda" else []

    def op_builder_dir(self) -> str:
        """Module that holds the builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The builder class of that name, or None where there is none."""
        return getattr(importlib.import_module("deepspeed_ops.op_builder.builders"), class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """An instance of the builder class of that name, or None where there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    @staticmethod
    def _torch() -> Any:
        return importlib.import_module("torch")


def get_accelerator() -> Accelerator:
    """The accelerator of this process, decided at the first call.

    Raises:
        SettingError: ``DS_ACCELERATOR`` names another kind.
    """
    global _current
    if _current is None:
        _current = Accelerator(_choose(os.environ))
    return _current


def set_accelerator(accelerator: Accelerator) -> None:
    """Replace what :func:`get_accelerator` returns."""
    global _current
    _current = accelerator


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator in use is one of ours."""
    return get_accelerator()._name in SUPPORTED_ACCELERATOR_LIST


def _choose(env: Mapping[str, str]) -> str:
    asked = env.get("DS_ACCELERATOR", "").strip()
    if asked and asked not in SUPPORTED_ACCELERATOR_LIST:
        raise SettingError(
            f"DS_ACCELERATOR={asked!r} is not supported",
            f"expected one of {', '.join(SUPPORTED_ACCELERATOR_LIST)}",
            "unset DS_ACCELERATOR",
        )
    if asked:
        return asked
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"
