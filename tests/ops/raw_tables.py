"""Drives the host libraries of the optimizer ops at the level below torch: tables of tensors of the caller's making."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed_ops.op_builder import loader
from raw import FORMATS
from torch import Tensor

from deepspeed_ops.table_step import HostStep


def step_tables(
    kind: type[HostStep],
    tensors: Sequence[Sequence[Tensor]],
    scalars: dict[str, Any],
    steps: Sequence[int] | None = None,
    level: str = "",
    threads: int = 1,
    function: str = "step_table",
) -> int:
    """One step of several tensors (p, g, the moments, maybe a copy of p) of one combination of dtypes, in place.

    Returns:
        How many threads took part.
    """
    n, rows = len(tensors), len(tensors[0])
    table = (ctypes.c_int64 * ((rows + 1) * n))()
    for i, columns in enumerate(tensors):
        for row, value in enumerate((*(x.data_ptr() for x in columns), columns[0].numel())):
            table[row * n + i] = value
    counters = (ctypes.c_int64 * n)(*(steps or [1] * n))
    formats = [FORMATS[x.dtype] for x in tensors[0]]
    args: Any = kind.Args(ctypes.addressof(table), ctypes.addressof(counters), n, *formats[:3])
    args.grad_scale, args.threads = 1.0, threads
    for name, value in scalars.items():
        setattr(args, name, value)
    more: tuple[int, ...] = ()
    if rows > len(kind.names):
        function, more = f"{function}_copy", (formats[-1],)
    run = getattr(loader.host_module(kind.library), function)
    return int(run(ctypes.addressof(args), *more, level))


def made(n: int, combination: tuple[torch.dtype, ...], rng: torch.Generator, positive: bool = False) -> list[Tensor]:
    """p and g about 1 in magnitude, a moment likewise or in [0, 1)."""
    pd, gd, sd = combination
    p, g = torch.randn(n, generator=rng).to(pd), torch.randn(n, generator=rng).to(gd)
    draw = torch.rand if positive else torch.randn
    return [p, g, draw(n, generator=rng).to(sd)]


def cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]
