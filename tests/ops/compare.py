"""Elementwise comparison with a float64 reference.

The bound: ``|got - ref| <= k * eps(float32) * (|ref| + scale) + one rounding to the storage dtype``.

``scale`` is the running error of float32 arithmetic in units of eps/2 (see reference.py), so k = 1 already allows
twice the first-order error; the terms of second order, which the analysis leaves out, are a millionth of it. Storing
to float16 or bfloat16 rounds once more: half an eps of that dtype, or half its smallest denormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

K = 1.0
EPS32 = float(torch.finfo(torch.float32).eps)
TINY = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float64: 0.0}


class Mismatch(AssertionError):
    """A result outside its bound."""


def bound(ref: Tensor, scale: Tensor, dtype: torch.dtype, eps: float = EPS32, k: float = K) -> Tensor:
    """Largest difference allowed for each element."""
    allowed = k * eps * (ref.abs() + scale) + TINY[dtype]
    if dtype in (torch.float16, torch.bfloat16):
        allowed = allowed + torch.finfo(dtype).eps / 2 * (ref.abs() + allowed)
    return allowed


def assert_close(name: str, got: Tensor, ref: Tensor, scale: Tensor, *, eps: float = EPS32, k: float = K) -> None:
    """Raise :class:`Mismatch` naming the worst element where ``got`` lies outside the bound.

    Args:
        name: for the message.
        got: result, of any dtype.
        ref, scale: float64, of its shape, from :func:`reference.adam`.
        eps: of the arithmetic; float32's unless the kernel computes in float64.
        k: factor; default: see the module.
    """
    if got.shape != ref.shape:
        raise Mismatch(f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}")
    wide = got.detach().to("cpu", torch.float64)
    expected = ref.detach().cpu()
    if got.dtype is not torch.float64:  # what is too large for the storage dtype is infinite in it
        narrow = expected.to(got.dtype)
        expected = torch.where(narrow.isinf(), narrow.to(torch.float64), expected)
    if not torch.equal(wide.isnan(), expected.isnan()):
        raise Mismatch(f"{name}: NaN at {int(wide.isnan().sum())} places, expected {int(expected.isnan().sum())}")
    infinite = expected.isinf() | wide.isinf()
    if not torch.equal(wide[infinite], expected[infinite]):
        raise Mismatch(f"{name}: infinities differ")
    checked = ~(infinite | expected.isnan())
    difference = (wide - expected).abs()[checked]
    allowed = bound(ref.detach().cpu(), scale.detach().cpu(), got.dtype, eps, k)[checked]
    if difference.numel() and not bool((difference <= allowed).all()):
        worst = int((difference / allowed).argmax())
        raise Mismatch(
            f"{name}: element {worst} of {got.numel()} is {float(wide[checked][worst])!r}, "
            f"expected {float(expected[checked][worst])!r} +- {float(allowed[worst]):.3g}; "
            f"{int((difference > allowed).sum())} outside"
        )


def assert_bits(name: str, got: Tensor, expected: Tensor, any_nan: bool = False) -> None:
    """Raise where two tensors differ in any bit (so -0 is not 0, and NaNs need equal payloads).

    Args:
        any_nan: one NaN is as good as another (processors make different ones).
    """
    assert got.dtype is expected.dtype and got.shape == expected.shape, f"{name}: {got.dtype} {tuple(got.shape)}"
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    a, b = (x.detach().cpu().contiguous().view(width) for x in (got, expected))
    if any_nan:
        a, b = (x.masked_fill(y.detach().cpu().isnan(), -1) for x, y in ((a, got), (b, expected)))
    if not torch.equal(a, b):
        bad = (a != b).nonzero()
        at = tuple(bad[0].tolist())
        raise Mismatch(
            f"{name}: {len(bad)} of {got.numel()} differ, first at {at}: {got[at]!r}, expected {expected[at]!r}"
        )
