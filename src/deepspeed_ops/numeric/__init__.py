"""A small numeric check of every op, for ``ds_ops verify``: what the op gives beside its formula in float64.

``check_<op>.py`` holds one function ``cases()``. It runs in a process of its own (``python -m deepspeed_ops.numeric
OP``), because a bad part may take its process along.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Float32 roundings that a few steps of a formula may add up to; a wrong formula is off by thousands.
TOLERANCE = 64 * 2.0**-24


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        what: what was run, for people.
        worst: largest ``|got - want| / (|want| + 1)`` over all elements; NaN and infinity count as infinite.
        bound: what it may be.
    """

    what: str
    worst: float
    bound: float = TOLERANCE

    @property
    def good(self) -> bool:
        """Whether the numbers are right."""
        return self.worst <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {**asdict(self), "good": self.good}


def compare(what: str, got: Tensor, want: Tensor, bound: float = TOLERANCE) -> Case:
    """Elementwise distance of a result from its float64 reference of the same shape."""
    import torch

    exact = got.detach().to("cpu", torch.float64)
    if exact.shape != want.shape:
        return Case(f"{what}: shape {tuple(exact.shape)} for {tuple(want.shape)}", 1e300, bound)
    distance = (exact - want).abs() / (want.abs() + 1.0)
    worst = float(distance.max()) if distance.numel() else 0.0
    return Case(what, worst if bool(torch.isfinite(distance).all()) else 1e300, bound)


def gpu() -> Any:
    """The device to check GPU code on; None where torch sees none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else None


def has_check(op: str) -> bool:
    """Whether a numeric check of the op exists."""
    return importlib.util.find_spec(f"{__name__}.check_{op}") is not None


def cases(op: str) -> list[Case]:
    """Run the op's check. An empty list: it has code for GPUs only, and none is visible."""
    return list(importlib.import_module(f"{__name__}.check_{op}").cases())
