"""The distributions that are made from this one tree; ``setup.py`` makes the one that ``DS_DISTRIBUTION`` names.

``pip install .`` makes ``deepspeed``, which holds both import packages. conda packages, and those who run DeepSpeed's
own engine, which owns the import name ``deepspeed``, need the two apart.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepspeed_ops.op_builder.errors import SettingError

VARIABLE = "DS_DISTRIBUTION"


@dataclass(frozen=True)
class Distribution:
    """One distribution.

    Attributes:
        name: as installers know it.
        tops: top-level import packages it holds.
        alone: whether it needs no other distribution of this tree; then it has the command lines and dependencies.
    """

    name: str
    tops: tuple[str, ...]
    alone: bool

    def holds(self, packages: Iterable[str]) -> list[str]:
        """Those of ``packages`` (dotted names) that belong to it."""
        return [p for p in packages if p.partition(".")[0] in self.tops]


# The names that DS_DISTRIBUTION takes. `deepspeed-names` is the distribution `deepspeed` without the work in it.
WHOLE = Distribution("deepspeed", ("deepspeed", "deepspeed_ops"), True)
DISTRIBUTIONS: Mapping[str, Distribution] = {
    "deepspeed": WHOLE,
    "deepspeed-ops": Distribution("deepspeed-ops", ("deepspeed_ops",), True),
    "deepspeed-names": Distribution("deepspeed", ("deepspeed",), False),
}


def asked(env: Mapping[str, str] | None = None) -> Distribution:
    """The distribution that ``DS_DISTRIBUTION`` names; unset or empty: ``deepspeed``, whole.

    Raises:
        SettingError: it names none.
    """
    value = (os.environ if env is None else env).get(VARIABLE, "") or WHOLE.name
    if value in DISTRIBUTIONS:
        return DISTRIBUTIONS[value]
    near = difflib.get_close_matches(value, DISTRIBUTIONS, 1) or list(DISTRIBUTIONS)
    raise SettingError(
        f"{VARIABLE}={value!r} names no distribution of this tree",
        f"known: {', '.join(DISTRIBUTIONS)}",
        f"{VARIABLE}={near[0]}",
    )
