"""Lists of tensors as packed tables of addresses, checked and compared at every step, uploaded only when they moved.

A step over thousands of parameters is bound by the host: building an FFI object per tensor, or asking each from Python for
its address, type and layout, costs more than the kernel. The host libraries therefore read the tensors' metadata through
DLPack's exchange table (torch 2.9 and newer; see ``csrc/common/tensor_list.h``). Where that is missing, the same checks run
in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import DtypeError, TensorError

# DLPack's type code * 256 + bits, and the code that the kernels use.
_DLPACK = {torch.float32: 2 * 256 + 32, torch.float16: 2 * 256 + 16, torch.bfloat16: 4 * 256 + 16, torch.float64: 2 * 256 + 64}
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
LISTS = ("p", "g", "m", "v")
_PLAIN = (Tensor, torch.nn.Parameter)
_ALL_ROWS = 0b11111


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
        ("list", _List * 4),
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


def identities(objects: list[Any]) -> bytes:
    """The identities of a list's objects, to be compared with those of another time (8 bytes each)."""
    if _OFFSETS is None:
        return array("q", map(id, objects)).tobytes()
    return ctypes.string_at(_items(objects), 8 * len(objects)) if objects else b""


def device_code(device: torch.device) -> int:
    """DLPack's device type * 65536 + index."""
    return (2 if device.type == "cuda" else 1) * 65536 + (device.index or 0)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is exactly ``Tensor`` or ``Parameter``: memory that a kernel may use by address."""
    return type(tensor) in _PLAIN


def check_updated(op: str, name: str, index: int, tensor: Tensor) -> None:
    """Refuse a tensor that is to be updated in place but does not own one dense run of elements.

    Raises:
        TensorError: strided, overlapping or sparse.
    """
    if tensor.layout is not torch.strided:
        raise TensorError(f"{op}: {name}[{index}] has layout {tensor.layout}", "expected a dense tensor", "use .to_dense()")
    if tensor.is_contiguous() or _memory_format(tensor) is not None:
        return
    raise TensorError(
        f"{op}: {name}[{index}] of shape {tuple(tensor.shape)} has strides {tensor.stride()}",
        "it is updated in place, so it must be contiguous (or channels_last); a copy would lose the update",
        f"{name}.data = {name}.data.contiguous()",
    )


def _memory_format(tensor: Tensor) -> torch.memory_format | None:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return None


def laid_out_like(op: str, index: int, g: Tensor, p: Tensor) -> Tensor:
    """The gradient in the layout of its parameter: itself where that holds, else a copy.

    Raises:
        TensorError: another shape or device, or sparse.
        DtypeError: not a floating point dtype that the kernels read.
    """
    if g.layout is not torch.strided:
        raise TensorError(
            f"{op}: gradient {index} is sparse", "Adam's moments are dense", "use torch.optim.SparseAdam, or sparse=False"
        )
    if g.shape != p.shape:
        raise TensorError(
            f"{op}: gradient {index} has shape {tuple(g.shape)}", f"its parameter has shape {tuple(p.shape)}", "set p.grad anew"
        )
    if g.device != p.device:
        raise TensorError(f"{op}: gradient {index} is on {g.device}", f"its parameter is on {p.device}", "g.to(p.device)")
    if g.dtype not in FORMATS or (g.dtype is torch.float64) != (p.dtype is torch.float64):
        raise DtypeError(
            f"{op}: gradient {index} is {g.dtype}", f"its parameter is {p.dtype}", f"p.grad = p.grad.to({p.dtype})"
        )
    if g.stride() == p.stride() or (g.is_contiguous() and p.is_contiguous()):
        return g
    return torch.empty_like(p, dtype=g.dtype).copy_(g)


class TensorTable:
    """Addresses of p, g, m, v and the element counts of ``n`` tensors: int64 ``[5][n]`` on the host.

    All p are of one dtype, all g, all m and v, and everything is on one device. The table holds addresses only, never the
    gradients themselves (they would outlive ``zero_grad``); every step checks them anew.

    Args:
        op: name for error texts.
        collect: the host library's ``collect_addresses``, or None.
        p, g, m, v: what the first step works on; checked.
    """

    def __init__(
        self,
        op: str,
        collect: Callable[[int], int] | None,
        lists: tuple[list[Any], list[Any], list[Any], list[Any]],
    ) -> None:
        p, g, m, _ = lists
        self.op, self.n = op, len(p)
        self.device = p[0].device
        first_g = next(x for x in g if x is not None)
        self.dtypes = (p[0].dtype, first_g.dtype, m[0].dtype, m[0].dtype)
        self.formats = tuple(FORMATS[d] for d in self.dtypes)
        self.host = torch.zeros((5, self.n), dtype=torch.int64)
        self.host[4] = torch.tensor([x.numel() for x in p], dtype=torch.int64)
        self._collect = collect if can_collect() else None
        if self._collect is not None:
            self._collect.release_gil = False  # type: ignore[attr-defined]
            self._args = self._collect_args()
            self._args_address = ctypes.addressof(self._args)
        self.temporaries: list[Tensor] = []  # gradients in another layout, copied; alive until the next step
        self.moved = self.refresh(*lists)

    def _collect_args(self) -> _CollectArgs:
        assert _OFFSETS is not None
        row = self.n * 8
        base = self.host.data_ptr()
        args = _CollectArgs(_EXCHANGE, id(None), _OFFSETS[1], (ctypes.c_int64 * 2)(*map(id, _PLAIN)), self.n)
        args.counts, args.device = base + 4 * row, device_code(self.device)
        for i in range(4):
            args.list[i].dtype, args.list[i].out = _DLPACK[self.dtypes[i]], base + i * row
        return args

    def refresh(self, p: list[Any], g: list[Any], m: list[Any], v: list[Any], only_gradients: bool = False) -> int:
        """Read all addresses anew.

        Args:
            p, g, m, v: ``n`` tensors each; a gradient may be None.
            only_gradients: the caller promises that the others are where they were.

        Returns:
            A bit per list (p 1, g 2, m 4, v 8) in which an address changed.

        Raises:
            TensorError, DtypeError: a tensor cannot be used in place, or is not what the table was made for.
        """
        if self.temporaries:
            self.temporaries = []
        if self._collect is not None:
            args = self._args
            args.first_list, args.end_list = (1, 2) if only_gradients else (0, 4)
            args.list[1].items = _items(g)
            if not only_gradients:
                args.list[0].items, args.list[2].items, args.list[3].items = _items(p), _items(m), _items(v)
            try:
                moved = self._collect(self._args_address)
            except SystemError:  # torch refused a tensor and left its exception behind: the checks below say which
                moved = -1
            if moved >= 0:
                return moved
        return self._refresh_in_python((p, g, m, v))

    def _refresh_in_python(self, lists: tuple[list[Any], ...]) -> int:
        p, moved = lists[0], 0
        for i, tensors in enumerate(lists):
            addresses = torch.tensor([self._address(i, k, x, p[k]) for k, x in enumerate(tensors)], dtype=torch.int64)
            if not torch.equal(addresses, self.host[i]):
                self.host[i] = addresses
                moved |= 1 << i
        return moved

    def _address(self, row: int, index: int, x: Tensor | None, p: Tensor) -> int:
        name = LISTS[row]
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
                    f"{self.op}: {name}[{index}] has strides {x.stride()}", f"its parameter has {p.stride()}", "load the state anew"
                )
        if x.dtype != self.dtypes[row]:
            raise DtypeError(
                f"{self.op}: {name}[{index}] is {x.dtype}", f"the others of its list are {self.dtypes[row]}", ""
            )
        if x.device != self.device or x.numel() != int(self.host[4, index]):
            raise TensorError(
                f"{self.op}: {name}[{index}] has {x.numel()} elements on {x.device}",
                f"expected {int(self.host[4, index])} on {self.device}",
                "",
            )
        return x.data_ptr()

    @property
    def address(self) -> int:
        """Address of the host table."""
        return int(self.host.data_ptr())


class DeviceTable(TensorTable):
    """A table whose copy in device memory the kernels read, with the list of chunks that blocks take.

    Uploads go through torch's pinned memory on the current stream, so that neither a synchronisation nor memory behind
    torch's back is needed. A captured graph keeps the copy it was captured with for its own: later steps get a fresh one,
    and addresses that moved (gradients made inside the capture) are uploaded by the graph itself, from pinned memory that
    nothing overwrites.
    """

    def __init__(
        self,
        op: str,
        collect: Callable[[int], int] | None,
        lists: tuple[list[Any], list[Any], list[Any], list[Any]],
        chunk_elements: int,
    ) -> None:
        super().__init__(op, collect, lists)
        self.chunks, self.blocks = self._chunks(chunk_elements)
        self._rows = torch.empty((5, self.n), dtype=torch.int64, device=self.device)
        self._rows_belong_to_graph = False
        self._captured: list[tuple[Tensor, Tensor]] = []
        self._spare: tuple[Tensor, Tensor] | None = None
        self._upload(self._rows, self._pinned(), _ALL_ROWS)

    def _chunks(self, chunk_elements: int) -> tuple[Tensor, int]:
        counts = (self.host[4] + (chunk_elements - 1)) // chunk_elements
        total = int(counts.sum())
        tensor = torch.repeat_interleave(torch.arange(self.n, dtype=torch.int32), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        pairs = torch.stack((tensor, (torch.arange(total) - first).to(torch.int32)), dim=1)
        return pairs.pin_memory().to(self.device, non_blocking=True), total

    def _pinned(self) -> Tensor:
        return torch.empty((5, self.n), dtype=torch.int64, pin_memory=True)

    def _upload(self, rows: Tensor, pinned: Tensor, moved: int) -> None:
        pinned.copy_(self.host)
        if moved == _ALL_ROWS:
            rows.copy_(pinned, non_blocking=True)
            return
        for i in range(4):
            if moved >> i & 1:
                rows[i].copy_(pinned[i], non_blocking=True)

    def rows_for(self, moved: int) -> int:
        """Address of the table in device memory, where the lists in ``moved`` were uploaded on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            return self._rows_for_capture(moved)
        if self._rows_belong_to_graph:
            self._rows, self._rows_belong_to_graph, moved = torch.empty_like(self._rows), False, _ALL_ROWS
        if self._spare is None:  # made now: a capture can allocate neither pinned nor ordinary memory that outlives it
            self._spare = (torch.empty_like(self._rows), self._pinned())
        if moved:
            self._upload(self._rows, self._pinned(), moved)
        return int(self._rows.data_ptr())

    def _rows_for_capture(self, moved: int) -> int:
        spare_rows, pinned = self._spare or (torch.empty_like(self._rows), self._pinned())
        self._spare = None
        rows = self._rows
        if self._rows_belong_to_graph:  # a second capture before any eager step
            rows, moved = spare_rows, _ALL_ROWS
        if moved:
            self._upload(rows, pinned, moved)
        self._captured.append((rows, pinned))
        self._rows, self._rows_belong_to_graph = rows, True
        return int(rows.data_ptr())
