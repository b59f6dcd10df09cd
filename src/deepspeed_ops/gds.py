"""``gds`` under DeepSpeed's names: ``gds_handle``, an ``aio_handle`` whose GPU tensors go through cuFile.

Where cuFile (``libcufile.so.0``, opened at run time) or its driver does not answer, GPU tensors bounce through pinned
memory; ``gds_handle.cufile`` says which. This has never been run on GPUDirect Storage hardware; without it, where
cuFile is in its compatibility mode, ``aio_handle`` is faster (docs/aio.md). No file is written and no variable set:
cuFile's own ``CUFILE_ENV_PATH_JSON`` is the user's.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.async_io import aio_handle
from deepspeed_ops.op_builder import loader
from deepspeed_ops.op_builder.errors import DriverError, TensorError

__all__ = ["gds_handle", "module"]
OP = "gds"


def module() -> ModuleType:
    """What ``GDSBuilder().load()`` returns: this module, with its host library loaded.

    Raises:
        OpsError: no part fits this machine and none can be built.
    """
    loader.host_module(OP)
    return sys.modules[__name__]


def cufile_state() -> tuple[bool, str]:
    """Whether cuFile answers in this process, and what was found."""
    works, _, why = str(loader.host_module(OP).cufile_state()).partition(": ")
    return works == "yes", why


class gds_handle(aio_handle):
    """DeepSpeed's handle. Constructor and methods are those of :class:`deepspeed_ops.async_io.aio_handle`."""

    _op = OP

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._registered: dict[int, Tensor] = {}

    @property
    def cufile(self) -> tuple[bool, str]:
        """Whether GPU tensors go through cuFile; else they bounce, and this says why."""
        return cufile_state()

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: Tensor) -> Tensor:
        """A new one-dimensional tensor on the GPU of ``example_tenosr``, with its dtype, registered with cuFile.

        Raises:
            TensorError: the example is not on a GPU.
            DriverError: cuFile refuses the memory.
        """
        _on_gpu(example_tenosr)
        tensor = torch.zeros(num_elem, dtype=example_tenosr.dtype, device=example_tenosr.device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Tensor) -> bool:
        """Take the registration back; the memory goes with the tensor. False for one that is not registered."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Tensor) -> bool:
        """Register a GPU tensor's memory with cuFile, which then need not do so in every transfer; True.

        Raises:
            TensorError: it is not on a GPU, or not contiguous.
            DriverError: cuFile refuses the memory.
        """
        _on_gpu(tensor)
        if not tensor.is_contiguous():
            raise TensorError(f"{OP}: the tensor has strides {tensor.stride()}", "expected one run of bytes", "")
        with self._lock:
            if tensor.data_ptr() not in self._registered:
                code = int(loader.host_module(OP).register_memory(tensor.data_ptr(), tensor.nbytes))
                if code:
                    raise DriverError(f"{OP}: {tensor.nbytes} bytes cannot be registered", f"cuFileBufRegister: {code}")
                self._registered[tensor.data_ptr()] = tensor
        return True

    def unpin_device_tensor(self, tensor: Tensor) -> bool:
        """Take the registration back. False for a tensor that is not registered (any more)."""
        with self._lock:
            known = self._registered.pop(tensor.data_ptr(), None)
            if known is not None:
                loader.host_module(OP).deregister_memory(tensor.data_ptr())
        return known is not None

    def close(self) -> None:
        """Wait for what is in flight, take registrations back, give everything back. Twice is once."""
        super().close()
        for tensor in tuple(self._registered.values()):
            self.unpin_device_tensor(tensor)


def _on_gpu(tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
        place = tensor.device if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TensorError(f"{OP}: the tensor is on {place}", "expected one on a GPU", "tensor.cuda()")
