"""Drives the host library of cpu_adam at the level below torch: addresses, formats and sizes of the caller's choice."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from deepspeed_ops.op_builder import loader
from reference import Hyper
from torch import Tensor

from deepspeed_ops.adam_step import CpuStepArgs

FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Every (parameter, gradient, state) combination the library takes.
COMBINATIONS = [
    (F32, F32, F32), (F32, F16, F32), (F32, BF16, F32),
    (F16, F16, F16), (F16, F16, F32), (F16, F32, F16), (F16, F32, F32),
    (BF16, BF16, BF16), (BF16, BF16, F32), (BF16, F32, BF16), (BF16, F32, F32),
]  # fmt: skip
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def combination_id(combination: tuple[torch.dtype, ...]) -> str:
    return "-".join({F32: "f32", F16: "f16", BF16: "bf16"}[d] for d in combination)


def step_many(tensors: Sequence[Tensors], steps: Sequence[int], h: Hyper, level: str = "", threads: int = 1) -> int:
    """One step of several tensors of one combination of dtypes, in place; how many threads took part."""
    n = len(tensors)
    table = (ctypes.c_int64 * (5 * n))()
    for i, (p, g, m, v) in enumerate(tensors):
        for row, value in enumerate((p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), p.numel())):
            table[row * n + i] = value
    counters = (ctypes.c_int64 * n)(*steps)
    formats = (FORMATS[x.dtype] for x in tensors[0][:3])
    args = CpuStepArgs(ctypes.addressof(table), ctypes.addressof(counters), n, *formats)
    args.lr, args.beta1, args.beta2, args.eps = h.lr, h.beta1, h.beta2, h.eps
    args.weight_decay, args.grad_scale, args.threads = h.weight_decay, h.grad_scale, threads
    args.adamw, args.bias_correction = int(h.adamw), int(h.bias_correction)
    return int(loader.host_module("cpu_adam").step_table(ctypes.addressof(args), level))


def random_tensors(n: int, combination: tuple[torch.dtype, ...], rng: torch.Generator) -> Tensors:
    """p, g and m about 1 in magnitude, v in [0, 1)."""
    pd, gd, sd = combination
    return (
        torch.randn(n, generator=rng).to(pd),
        torch.randn(n, generator=rng).to(gd),
        torch.randn(n, generator=rng).to(sd),
        torch.rand(n, generator=rng).to(sd),
    )


def copies(tensors: Tensors) -> Tensors:
    p, g, m, v = (x.clone() for x in tensors)
    return p, g, m, v
