"""Registers ops with torch from their specs, and says when eager code may call a kernel directly.

The dispatcher costs about 12 us a call for an op that is registered in Python; the kernel's own function 1 us. Eager
public functions therefore skip it, but only where nothing could notice: :func:`is_eager` holds and every tensor is
plain.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_ops.op_builder.spec import all_specs, get_spec

NAMESPACE = "deepspeed"
# FRAGMENT: DeepSpeed's engine, where it is installed, defines ops of its own in this namespace.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(op: str, name: str, kernels: Mapping[str, Callable[..., Any]], fake: Callable[..., Any]) -> Any:
    """Define ``deepspeed::<name>`` with the schema in the spec of ``op``.

    Args:
        op: the spec's name.
        name: the schema's name.
        kernels: implementation by dispatch key (``"CPU"``, ``"CUDA"``).
        fake: what the op does to fake tensors: shapes and dtypes of its results, no data.

    Returns:
        ``torch.ops.deepspeed.<name>``.
    """
    _LIBRARY.define(name + get_spec(op).schemas[name])
    for key, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name)


def load_all() -> tuple[str, ...]:
    """Register every op of the registry; their qualified names, for tests that walk all of them."""
    for spec in all_specs().values():
        importlib.import_module(spec.face)
    return tuple(f"{NAMESPACE}::{name}" for spec in all_specs().values() for name in spec.schemas)


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts torch calls right now."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _bumps_lists() -> bool:
    """Whether this torch's ``increment_version`` takes a list (from 2.6 on)."""
    try:
        torch.autograd.graph.increment_version([])
    except RuntimeError:
        return False
    return True


_BUMPS_LISTS = _bumps_lists()


def updated_in_place(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that a kernel changed these tensors: a graph that saved one of them must not be used any more."""
    if _BUMPS_LISTS:
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
