"""What may be read into or written from: tensors on the CPU or a GPU, and objects with a buffer (bytearray, mmap)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import TensorError
from deepspeed_ops.registry import updated_in_place
from deepspeed_ops.tensor_checks import is_plain


class Memory(NamedTuple):
    """One run of bytes.

    Attributes:
        address: of its first byte, in host or GPU memory.
        length: bytes.
        device: ordinal of the GPU it lies on, or -1.
        stream: the GPU stream whose work comes before the copy, as an integer.
        owner: keeps it alive.
    """

    address: int
    length: int
    device: int
    stream: int
    owner: Any


def memory_of(op: str, buffer: Any, written_to: bool) -> Memory:
    """The memory of a buffer, which the result keeps alive.

    Args:
        op: for messages.
        buffer: a contiguous tensor (a view of any dtype and any offset is one), or an object with a contiguous buffer.
        written_to: whether a read will change it.

    Raises:
        TensorError: it is strided, sparse, lazily conjugated or a subclass; or read-only and ``written_to``.
    """
    return _of_tensor(op, buffer, written_to) if isinstance(buffer, Tensor) else _of_object(op, buffer, written_to)


def _of_tensor(op: str, tensor: Tensor, written_to: bool) -> Memory:
    if not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        what = f"{op}: the buffer is a {type(tensor).__name__} of layout {tensor.layout}"
        raise TensorError(what, "expected a plain dense tensor, whose memory can be used by address", "")
    if not tensor.is_contiguous():
        why = "its bytes do not lie in one run, and a copy would lose what is read"
        what = f"{op}: the buffer of shape {tuple(tensor.shape)} has strides {tensor.stride()}"
        raise TensorError(what, why, "give a contiguous tensor")
    device, kind = tensor.device, tensor.device.type
    address = tensor.data_ptr() if kind in ("cpu", "cuda") else 0
    if address == 0 and (tensor.numel() or kind not in ("cpu", "cuda")):
        what = f"{op}: the buffer of shape {tuple(tensor.shape)} on {device} has no memory that can be used"
        raise TensorError(what, "expected a tensor on the CPU or a CUDA device that holds its data", "tensor.cpu()")
    if written_to and not tensor.is_inference():
        updated_in_place([tensor])
    if kind == "cpu":
        return Memory(address, tensor.nbytes, -1, 0, tensor)
    stream = int(torch.cuda.current_stream(device).cuda_stream)
    return Memory(address, tensor.nbytes, int(device.index), stream, tensor)


def _of_object(op: str, buffer: Any, written_to: bool) -> Memory:
    try:
        view = memoryview(buffer)
    except TypeError as exc:
        raise TensorError(
            f"{op}: the buffer is a {type(buffer).__name__}", "expected a tensor or a buffer", ""
        ) from exc
    if not view.c_contiguous or (written_to and view.readonly):
        what = f"{op}: the buffer of {view.nbytes} bytes is {'read-only' if view.c_contiguous else 'not contiguous'}"
        raise TensorError(what, "expected one run of bytes" + (" that can be changed" if written_to else ""), "")
    if view.nbytes == 0:
        return Memory(0, 0, -1, 0, view)
    flat = view.cast("B")
    if not view.readonly:
        kept = (ctypes.c_char * view.nbytes).from_buffer(flat)
        return Memory(ctypes.addressof(kept), view.nbytes, -1, 0, (kept, flat))
    # ctypes takes no read-only buffer; torch does, and is not written through.
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.frombuffer(flat, dtype=torch.uint8)
    return Memory(tensor.data_ptr(), view.nbytes, -1, 0, (tensor, flat))
