"""The functional form of a step: lists of any plain tensors, split by dtype, updated in place.

``torch.ops.deepspeed.cpu_adam_``, ``fused_lion_`` and their like are this function under the dispatcher. Tables of
recent calls are kept, so that a compiled training step, which calls with the same parameters again, packs them once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ops.op_builder.errors import TensorError, UsageError
from deepspeed_ops.registry import updated_in_place
from deepspeed_ops.step_inputs import Amp
from deepspeed_ops.table_step import Lists
from deepspeed_ops.tensor_checks import groups_by_dtype

_KEPT = 16  # tables
_tables: OrderedDict[tuple[object, ...], Any] = OrderedDict()
MakeStep = Callable[[str, Lists], Any]


def _step_for(op: str, make: MakeStep, lists: Lists) -> Any:
    p = lists[0]
    dtypes = tuple(next((x.dtype for x in some if x is not None), None) for some in lists)
    key = (op, make, p[0].device, dtypes, tuple((x.data_ptr(), x.numel()) for x in p))
    step = _tables.pop(key, None) or make(op, lists)
    _tables[key] = step
    while len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return step


def update_(
    op: str,
    make: MakeStep,
    lists: Lists,
    steps: Sequence[Tensor],
    scalars: Any,
    lr: Tensor | None = None,
    amp: Amp | None = None,
    noop_flag: Tensor | None = None,
) -> list[tuple[list[int], Any]]:
    """Count a step of every tensor and update p and the moments.

    Args:
        op: name for error texts.
        make: makes the kernel side of tensors that share dtypes and device.
        lists: p, g, the moments, maybe copies of p, ``n`` tensors each. Mutated: all but g.
        steps: ``n`` int64 tensors of one element: steps taken so far, all on the CPU or all on the parameters' device.
            Mutated: counted up.
        scalars: shared by all.
        lr: float32 tensor of one element on the GPU in place of ``scalars.lr``; needs steps on the GPU.
        amp: scale of the gradients, and whether any was infinite.
        noop_flag: int32 tensor of one element on the parameters' device: not 0 = do nothing.

    Returns:
        Positions of the tensors and the step that updated them, for each table.

    Raises:
        TensorError, DtypeError, UsageError: an argument that no kernel takes.
    """
    _check(op, lists, steps)
    p, g, m = lists[:3]
    done = []
    for part in groups_by_dtype(p, g, m):
        chosen = [[x[i] for i in part] for x in lists]
        counters = torch.stack([steps[i].reshape(()) for i in part])
        if lr is not None and counters.device.type == "cpu" and p[part[0]].device.type == "cuda":
            raise UsageError(
                f"{op}: lr is a tensor on {lr.device} and the steps are on the CPU", "", "steps on the GPU"
            )
        step = _step_for(op, make, chosen)
        step.launch(step.look(chosen), counters, scalars, lr, amp or Amp(), noop_flag)
        for i, counter in zip(part, counters.unbind(), strict=True):
            steps[i].copy_(counter.reshape(steps[i].shape))
        done.append((part, step))
    updated_in_place([x for some in (p, *lists[2:]) for x in some if x is not None])
    return done


def _check(op: str, lists: Lists, steps: Sequence[Tensor]) -> None:
    sizes = tuple(map(len, (*lists, steps)))
    if len(set(sizes)) != 1:
        raise TensorError(f"{op}: p, g, the moments and steps have {sizes} tensors", "expected as many of each", "")
    for i, count in enumerate(steps):
        if count.dtype is not torch.int64 or count.numel() != 1:
            raise TensorError(
                f"{op}: steps[{i}] is {count.dtype} {tuple(count.shape)}", "expected one int64 element", ""
            )
        if count.device.type != "cpu" and count.device != lists[0][i].device:
            raise TensorError(f"{op}: steps[{i}] is on {count.device}", f"its parameter is on {lists[0][i].device}", "")
