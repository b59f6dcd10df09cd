"""What an op is, as data. ``op_builder/ops/<op>.py`` holds one literal ``SPEC`` each; this room reads them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .errors import UsageError


@dataclass(frozen=True)
class OpSpec:
    """One op. Every other room derives what it does from this value.

    Attributes:
        name: the op's one name, spelled alike in folder, file prefix, test, docs and error text.
        summary: one line for tables.
        env_var: the variable that forces (1) or forbids (0) building it ahead of time.
        builder: name of the DeepSpeed builder class (``CPUAdamBuilder``).
        absolute_name: DeepSpeed's module path of the compiled op.
        face: module of ``deepspeed_ops`` that serves the op's DeepSpeed-named functions on torch tensors.
        functions: the names ``load()`` offers, DeepSpeed's own first.
        schemas: ``torch.library`` schemas by op name (without the namespace).
        host: host sources, relative to ``csrc``; one library for all of them.
        device: device sources, relative to ``csrc``; one cubin or PTX per target for all of them.
        kernels: entry points every device part must hold.
        simd: SIMD levels of the host code, best first, by machine.
        min_sm: lowest compute capability the device code supports, ``(major, minor)``, or None without device code.
        needs: names of probes (system libraries) the host part depends on.
        dtypes: parameter dtypes.
        layout: what the tensors must look like.
        formula: the formula and its source.
        deterministic: whether equal inputs give bitwise equal outputs.
        since: first version that has the op.
    """

    name: str
    summary: str
    env_var: str
    builder: str
    absolute_name: str
    face: str
    functions: tuple[str, ...]
    schemas: Mapping[str, str]
    host: tuple[str, ...]
    device: tuple[str, ...]
    kernels: tuple[str, ...]
    simd: Mapping[str, tuple[str, ...]]
    min_sm: tuple[int, int] | None
    needs: tuple[str, ...]
    dtypes: tuple[str, ...]
    layout: str
    formula: str
    deterministic: bool
    since: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def python_only(self) -> bool:
        """Whether there is nothing to compile: the op is installed wherever its face is."""
        return not self.host and not self.device


def _freeze(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return MappingProxyType({k: _freeze(v) for k, v in value.items()})
    return value


def from_literal(literal: Mapping[str, Any]) -> OpSpec:
    """Make an :class:`OpSpec` of a JSON-serialisable literal; a missing or unknown key is a :class:`UsageError`."""
    try:
        return OpSpec(**{k: _freeze(v) for k, v in literal.items()})
    except TypeError as exc:
        raise UsageError(
            f"op spec {literal.get('name', '?')!r} is not complete",
            str(exc),
            "compare op_builder/ops/<op>.py with the attributes of op_builder.spec.OpSpec",
        ) from exc


@functools.cache
def all_specs() -> Mapping[str, OpSpec]:
    """Every op of the registry by name, in the order of the names."""
    package = importlib.import_module(".ops", __package__)
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    specs = (from_literal(importlib.import_module(f".ops.{n}", __package__).SPEC) for n in names)
    return MappingProxyType({s.name: s for s in specs})


def get_spec(name: str) -> OpSpec:
    """The spec of one op; an unknown name is a :class:`UsageError` with the nearest spelling."""
    specs = all_specs()
    if name in specs:
        return specs[name]
    import difflib

    near = difflib.get_close_matches(name, specs, 1)
    hint = f"use {near[0]!r}" if near else "use one of: " + ", ".join(specs)
    raise UsageError(f"no op is named {name!r}", f"the registry holds {', '.join(specs)}", hint)
