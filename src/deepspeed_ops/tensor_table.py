"""Lists of tensors as packed tables of addresses, checked and compared at every step, uploaded only when they moved.

A step over thousands of parameters is bound by the host: building an FFI object per tensor, or asking each from Python
for its address, type and layout, costs more than the kernel. The host libraries therefore read the tensors' metadata
through DLPack's exchange table (torch 2.9 and newer; see ``csrc/common/tensor_list.h``). Where that is missing, the
same checks run in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import DtypeError, TensorError
from deepspeed_ops.tensor_checks import FORMATS, PLAIN, check_updated, is_plain, laid_out_like

# DLPack's type code * 256 + bits, and the code that the kernels use.
_DLPACK = {
    torch.float32: 2 * 256 + 32,
    torch.float16: 2 * 256 + 16,
    torch.bfloat16: 4 * 256 + 16,
    torch.float64: 2 * 256 + 64,
}
LISTS = ("p", "g", "m", "v", "copy")


class _List(ctypes.Structure):
    _fields_ = [("items", ctypes.c_int64), ("dtype", ctypes.c_int64), ("out", ctypes.c_int64)]


class _CollectArgs(ctypes.Structure):
    """``ds::CollectArgs`` of csrc/common/tensor_list.h, field by field."""

    _fields_ = [
        ("exchange", ctypes.c_int64),
        ("none", ctypes.c_int64),
        ("type_offset", ctypes.c_int64),
        ("types", ctypes.c_int64 * 2),
        ("n", ctypes.c_int64),
        ("counts", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("first_list", ctypes.c_int64),
        ("end_list", ctypes.c_int64),
        ("list", _List * len(LISTS)),
    ]


def _exchange_table() -> int:
    """Address of torch's DLPack exchange table, 0 where this torch has none."""
    capsule = Tensor.__dict__.get("__dlpack_c_exchange_api__") or getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, b"dlpack_exchange_api") or 0)


def _object_offsets() -> tuple[int, int] | None:
    """Where this interpreter keeps a list's item array and an object's type, in bytes; None where a trial disagrees.

    Both follow from public sizes (a list is its header, the array's address and a capacity; an object is its count and
    its type); a trial with known objects proves them before anything relies on them.
    """
    items, kind = list.__basicsize__ - 2 * ctypes.sizeof(ctypes.c_void_p), object.__basicsize__ - 8
    trial: list[object] = [object(), "text", 1.5, [], None]
    try:
        array = ctypes.c_void_p.from_address(id(trial) + items).value
        found = [ctypes.c_void_p.from_address((array or 0) + 8 * i).value for i in range(len(trial))] if array else []
        kinds = [ctypes.c_void_p.from_address(id(x) + kind).value for x in trial]
    except (ValueError, OSError):
        return None
    proved = found == [id(x) for x in trial] and kinds == [id(type(x)) for x in trial]
    return (items, kind) if proved else None


_EXCHANGE = _exchange_table()
_OFFSETS = _object_offsets()


def can_collect() -> bool:
    """Whether tensor metadata can be read natively here (else: in Python, with the same result)."""
    return _EXCHANGE != 0 and _OFFSETS is not None


def _items(tensors: list[Any]) -> int:
    assert _OFFSETS is not None
    return ctypes.c_int64.from_address(id(tensors) + _OFFSETS[0]).value


_ABSENT = 1 << 8  # csrc/common/tensor_list.h: a gradient was None


def identities(objects: list[Any]) -> bytes:
    """The identities of a list's objects, to be compared with those of another time (8 bytes each)."""
    if _OFFSETS is None:
        return array("q", map(id, objects)).tobytes()
    return ctypes.string_at(_items(objects), 8 * len(objects)) if objects else b""


def device_code(device: torch.device) -> int:
    """DLPack's device type * 65536 + index."""
    return (2 if device.type == "cuda" else 1) * 65536 + (device.index or 0)


class TensorTable:
    """Addresses of p, g, the moments and copies of p, and the element counts, of ``n`` tensors: int64
    ``[lists + 1][n]`` on the host.

    The tensors of a list are of one dtype, and everything is on one device. The table holds addresses only, never the
    gradients themselves (they would outlive ``zero_grad``); every step checks them anew.

    Args:
        op: name for error texts.
        collect: the host library's ``collect_addresses``, or None.
        lists: p, g, one or two moments, maybe copies, as the first step has them; or gradients alone. Checked.
        names: of the lists, for error texts.
    """

    def __init__(
        self,
        op: str,
        collect: Callable[[int], int] | None,
        lists: Sequence[list[Any]],
        names: Sequence[str] = LISTS,
    ) -> None:
        p = lists[0]
        self.op, self.n, self.lists, self.names = op, len(p), len(lists), names
        self.device = p[0].device
        # A list without any tensor in it (no copies) has no dtype: any will do.
        firsts = [next((x for x in some if x is not None), p[0]) for some in lists]
        self.dtypes = tuple(x.dtype for x in firsts)
        self.formats = tuple(FORMATS[d] for d in self.dtypes)
        self.host = torch.zeros((self.lists + 1, self.n), dtype=torch.int64)
        self.host[-1] = torch.tensor([x.numel() for x in p], dtype=torch.int64)
        self._collect = collect if can_collect() else None
        if self._collect is not None:
            self._collect.release_gil = False  # type: ignore[attr-defined]
            self._args = self._collect_args()
            self._args_address = ctypes.addressof(self._args)
        self.all_present = True  # whether every tensor had a gradient at the last look
        self.temporaries: list[Tensor] = []  # gradients in another layout, copied; alive until the next step
        self.refresh(lists)

    def _collect_args(self) -> _CollectArgs:
        assert _OFFSETS is not None
        row = self.n * 8
        base = self.host.data_ptr()
        args = _CollectArgs(_EXCHANGE, id(None), _OFFSETS[1], (ctypes.c_int64 * 2)(*map(id, PLAIN)), self.n)
        args.counts, args.device = base + self.lists * row, device_code(self.device)
        for i, dtype in enumerate(self.dtypes):
            args.list[i].dtype, args.list[i].out = _DLPACK[dtype], base + i * row
        return args

    def refresh(self, lists: Sequence[list[Any]], only_gradients: bool = False) -> int:
        """Read all addresses anew.

        Args:
            lists: p, g and the moments, ``n`` tensors each; a gradient may be None.
            only_gradients: the caller promises that the others are where they were.

        Returns:
            A bit per list (p 1, g 2, first moment 4, ...) in which an address changed.

        Raises:
            TensorError, DtypeError: a tensor cannot be used in place, or is not what the table was made for.
        """
        if self.temporaries:
            self.temporaries = []
        if self._collect is not None:
            args = self._args
            if only_gradients:
                args.first_list, args.end_list = 1, 2
                args.list[1].items = _items(lists[1])
            else:
                args.first_list, args.end_list = 0, self.lists
                for i, tensors in enumerate(lists):
                    args.list[i].items = _items(tensors)
            try:
                moved = self._collect(self._args_address)
            except SystemError:  # torch refused a tensor and left its exception behind: the checks below say which
                moved = -1
            if moved >= 0:
                self.all_present = not moved & _ABSENT
                return moved & ~_ABSENT
        return self._refresh_in_python(lists)

    def _refresh_in_python(self, lists: Sequence[list[Any]]) -> int:
        p, moved = lists[0], 0
        self.all_present = self.lists == 1 or all(x is not None for x in lists[1])
        for i, tensors in enumerate(lists):
            addresses = torch.tensor([self._address(i, k, x, p[k]) for k, x in enumerate(tensors)], dtype=torch.int64)
            if not torch.equal(addresses, self.host[i]):
                self.host[i] = addresses
                moved |= 1 << i
        return moved

    def refuse_overlap(self) -> None:
        """Refuse tensors to be updated that share memory: the result would depend on who comes first.

        Raises:
            TensorError: two of them do.
        """
        rows = [i for i in range(self.lists) if i != 1]
        begin = self.host[rows].flatten()
        end = begin + torch.stack([self.host[-1] * self.dtypes[i].itemsize for i in rows]).flatten()
        end[begin == 0] = 0  # absent
        order = begin.argsort()
        order = order[end[order] > begin[order]]  # without empty ones; if any two overlap, then two neighbours do
        shared = (begin[order[1:]] < end[order[:-1]]).nonzero()
        if shared.numel():
            found = (divmod(int(k), self.n) for k in order[int(shared[0]) :][:2])
            names = " and ".join(f"{self.names[rows[row]]}[{i}]" for row, i in found)
            raise TensorError(f"{self.op}: {names} overlap in memory", "each is updated in place", "clone one of them")

    def count(self, counters: Tensor) -> None:
        """Count a step of every tensor that had a gradient at the last look.

        Args:
            counters: int64 ``[n]`` on the host. Mutated.
        """
        if self.all_present:
            counters.add_(1)
        else:
            counters.add_(self.present)

    @property
    def present(self) -> Tensor:
        """Which tensors have a gradient: bool ``[n]`` on the host."""
        return self.host[1] != 0

    def _address(self, row: int, index: int, x: Tensor | None, p: Tensor) -> int:
        name = self.names[row]
        if x is None:
            return 0
        if not is_plain(x):
            raise TensorError(f"{self.op}: {name}[{index}] is a {type(x).__name__}", "expected exactly a Tensor", "")
        if row == 1:
            laid_out = laid_out_like(self.op, index, x, p)
            if laid_out is not x:
                self.temporaries.append(laid_out)
                x = laid_out
        else:
            check_updated(self.op, name, index, x)
            if x.stride() != p.stride() and not (x.is_contiguous() and p.is_contiguous()):
                raise TensorError(
                    f"{self.op}: {name}[{index}] has strides {x.stride()}",
                    f"its parameter has {p.stride()}",
                    "load the state anew",
                )
        if x.dtype != self.dtypes[row]:
            raise DtypeError(
                f"{self.op}: {name}[{index}] is {x.dtype}", f"the others of its list are {self.dtypes[row]}", ""
            )
        if x.device != self.device or x.numel() != int(self.host[-1, index]):
            raise TensorError(
                f"{self.op}: {name}[{index}] has {x.numel()} elements on {x.device}",
                f"expected {int(self.host[-1, index])} on {self.device}",
                "",
            )
        return x.data_ptr()

    @property
    def address(self) -> int:
        """Address of the host table."""
        return int(self.host.data_ptr())
