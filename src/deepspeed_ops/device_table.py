"""A table of addresses in device memory, as the kernels read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.tensor_table import LISTS, TensorTable

_ALL_ROWS = -1  # every bit
SEGMENT = 2048  # chunks: 8 partial sums for each of the 256 threads of csrc/common/reduce.cuh


class DeviceTable(TensorTable):
    """A table whose copy in device memory the kernels read, with the list of chunks that blocks take.

    Uploads go through torch's pinned memory on the current stream, so that neither a synchronisation nor memory behind
    torch's back is needed. A captured graph keeps the copy it was captured with for its own: later steps get a fresh
    one, and addresses that moved (gradients made inside the capture) are uploaded by the graph itself, from pinned
    memory that nothing overwrites.
    """

    def __init__(
        self,
        op: str,
        collect: Callable[[int], int] | None,
        lists: Sequence[list[Any]],
        chunk_elements: int,
        names: Sequence[str] = LISTS,
    ) -> None:
        super().__init__(op, collect, lists, names)
        self.chunks, self.blocks = self._chunks(chunk_elements)
        self._rows = torch.empty_like(self.host, device=self.device)
        self._rows_belong_to_graph = False
        self._captured: list[tuple[Tensor, Tensor]] = []
        self._spare: tuple[Tensor, Tensor] | None = None
        self._upload(self._rows, self._pinned(), _ALL_ROWS)

    def _chunks(self, chunk_elements: int) -> tuple[Tensor, int]:
        counts = self._chunk_counts = (self.host[-1] + (chunk_elements - 1)) // chunk_elements
        total = int(counts.sum())
        tensor = torch.repeat_interleave(torch.arange(self.n, dtype=torch.int32), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        pairs = torch.stack((tensor, (torch.arange(total) - first).to(torch.int32)), dim=1)
        return pairs.pin_memory().to(self.device, non_blocking=True), total

    def segments(self) -> tuple[Tensor, Tensor]:
        """The chunks of each tensor in runs of at most ``SEGMENT``, whose partial sums one block adds up.

        Returns:
            int32 ``[segments][2]``: first chunk, number of chunks; int32 ``[n + 1]``: the first segment of each tensor.
            Both in device memory.
        """
        chunks = self._chunk_counts
        per_tensor = (chunks + (SEGMENT - 1)) // SEGMENT
        first_segment = torch.cat((torch.zeros(1, dtype=torch.int64), per_tensor.cumsum(0)))
        tensor = torch.repeat_interleave(torch.arange(self.n), per_tensor)
        within = torch.arange(tensor.numel()) - first_segment[tensor]
        first = (chunks.cumsum(0) - chunks)[tensor] + within * SEGMENT
        count = (chunks[tensor] - within * SEGMENT).clamp(max=SEGMENT)
        pairs = torch.stack((first, count), dim=1).to(torch.int32)
        return (
            pairs.pin_memory().to(self.device, non_blocking=True),
            first_segment.to(torch.int32).pin_memory().to(self.device, non_blocking=True),
        )

    def _pinned(self) -> Tensor:
        return torch.empty(self.host.shape, dtype=torch.int64, pin_memory=True)

    def _upload(self, rows: Tensor, pinned: Tensor, moved: int) -> None:
        pinned.copy_(self.host)
        if moved == _ALL_ROWS:
            rows.copy_(pinned, non_blocking=True)
            return
        for i in range(self.lists):
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
