"""The functional form of an Adam step: lists of any plain tensors, split by dtype, updated in place.

``torch.ops.deepspeed.cpu_adam_`` and ``fused_adam_`` are this function under the dispatcher. Tables of recent calls
are kept, so that a compiled training step, which calls with the same parameters again, packs them once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_ops.adam_scalars import AdamScalars
from deepspeed_ops.adam_step import AdamStep, GpuStep, Lists, make_step
from deepspeed_ops.op_builder.errors import TensorError, UsageError
from deepspeed_ops.registry import updated_in_place
from deepspeed_ops.table_optimizer import Amp
from deepspeed_ops.tensor_checks import groups_by_dtype

_KEPT = 16  # tables
_tables: OrderedDict[tuple[object, ...], AdamStep] = OrderedDict()


def _step_for(op: str, lists: Lists) -> AdamStep:
    p, g, m, _ = lists
    first = next(x for x in g if x is not None)
    key = (op, p[0].device, p[0].dtype, first.dtype, m[0].dtype, tuple((x.data_ptr(), x.numel()) for x in p))
    step = _tables.pop(key, None) or make_step(op, lists)
    _tables[key] = step
    while len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return step


def adam_(
    op: str,
    lists: Lists,
    steps: Sequence[Tensor],
    scalars: AdamScalars,
    lr: Tensor | None = None,
    amp: Amp | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """Count a step of every tensor and update p, m and v.

    Args:
        op: name for error texts.
        lists: p, g, m, v, ``n`` tensors each. Mutated: p, m, v.
        steps: ``n`` int64 tensors of one element: steps taken so far, all on the CPU or all on the parameters' device.
            Mutated: counted up.
        scalars: shared by all.
        lr: float32 tensor of one element on the GPU in place of ``scalars.lr``; needs steps on the GPU.
        amp: scale of the gradients, and whether any was infinite.
        noop_flag: int32 tensor of one element on the GPU: not 0 = do nothing.

    Raises:
        TensorError, DtypeError, UsageError: an argument that no kernel takes.
    """
    p, g, m, v = lists
    if not len(p) == len(g) == len(m) == len(v) == len(steps):
        sizes = tuple(map(len, (*lists, steps)))
        raise TensorError(f"{op}: p, g, m, v, steps have {sizes} tensors", "expected as many of each", "")
    for i, count in enumerate(steps):
        if count.dtype is not torch.int64 or count.numel() != 1:
            raise TensorError(
                f"{op}: steps[{i}] is {count.dtype} {tuple(count.shape)}", "expected one int64 element", ""
            )
        if count.device.type != "cpu" and count.device != p[i].device:
            raise TensorError(f"{op}: steps[{i}] is on {count.device}", f"its parameter is on {p[i].device}", "")
    for part in groups_by_dtype(p, g, m):
        chosen = [[x[i] for i in part] for x in lists]
        counters = torch.stack([steps[i].reshape(()) for i in part])
        if lr is not None and counters.device.type == "cpu" and p[part[0]].device.type == "cuda":
            raise UsageError(
                f"{op}: lr is a tensor on {lr.device} and the steps are on the CPU", "", "steps on the GPU"
            )
        step = _step_for(op, chosen)
        moved = step.look(chosen)
        if isinstance(step, GpuStep):
            step.launch(moved, counters, scalars, lr, amp or Amp(), noop_flag)
        else:
            step.launch(moved, counters, scalars, lr, amp or Amp())
        for i, counter in zip(part, counters.unbind(), strict=True):
            steps[i].copy_(counter.reshape(steps[i].shape))
    updated_in_place([*p, *m, *v])
