"""float16 and bfloat16 conversions of every SIMD level, through the op: all patterns and every rounding boundary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import assert_bits
from raw import BF16, F16, step_many
from reference import Hyper
from torch import Tensor

at_every_level = pytest.mark.parametrize("level", ("scalar", "avx2", "avx512"), indirect=True)
of_both = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
# With beta1 = 0 the first moment becomes the gradient, converted to the state's dtype and nothing else.
COPY = Hyper(lr=0.0, beta1=0.0, beta2=0.0)


def patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def bits32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.uint32).view(np.float32).copy())


def rounding_boundaries(dtype: torch.dtype) -> Tensor:
    """Floats around every number of ``dtype`` and around every midpoint of two neighbours, both signs."""
    exact = patterns(dtype).float()
    exact = exact[exact.isfinite()].abs().unique().double()
    midpoints = (exact[:-1] + exact[1:]) / 2  # exact in float32: one more bit than the narrow dtype has
    top = exact[-1] + (exact[-1] - exact[-2]) / 2  # from here on the result is infinite
    centre = torch.cat((exact, midpoints, top.reshape(1))).float()
    u = centre.view(torch.int32)
    around = torch.cat([u, u + 1, (u - 1).clamp(min=0)]).view(torch.float32)
    return torch.cat((around, -around))


def stored(values: Tensor, dtype: torch.dtype, level: str) -> Tensor:
    """What the level stores for these floats, read from the first moment."""
    n = len(values)
    m = torch.zeros(n, dtype=dtype)
    step_many([(torch.zeros(n, dtype=dtype), values.clone(), m, torch.zeros(n, dtype=dtype))], [1], COPY, level)
    return m


@at_every_level
@of_both
def test_every_pattern_is_read_exactly(dtype: torch.dtype, level: str) -> None:
    """Fault: a denormal, infinity or NaN misread by one level. Parameter float32, gradient of the narrow dtype."""
    g = patterns(dtype)
    m = torch.zeros(2**16)
    step_many([(torch.zeros(2**16), g, m, torch.zeros(2**16))], [1], COPY, level)
    expected = g.float()
    nan = expected.isnan()
    assert torch.equal(m.isnan(), nan)
    # 0 * m adds +0: the sign of a zero is lost, of nothing else.
    assert_bits("m", m[~nan], torch.where(expected == 0, torch.zeros(()), expected)[~nan])


@at_every_level
@of_both
def test_every_pattern_survives_a_round_trip(dtype: torch.dtype, level: str) -> None:
    """Fault: storing what was read changes it. With lr 0 the parameter is read and stored; NaNs come back quiet.

    Without infinities: the formula's decay, 0 * infinity, makes a NaN of those. test_float_extremes has them.
    """
    p = patterns(dtype)
    zeros = torch.zeros(2**16, dtype=dtype)
    step_many([(p, zeros, zeros.clone(), zeros.clone())], [1], COPY, level)
    before = patterns(dtype)
    nan, finite = before.isnan(), before.isfinite()
    assert_bits("p", p[finite], before[finite])
    quiet = before.view(torch.int16)[nan] | (0x0200 if dtype is F16 else 0x0040)
    assert torch.equal(p.view(torch.int16)[nan], quiet), "a NaN lost its sign or payload, or is not quiet"


@at_every_level
@of_both
def test_every_rounding_boundary(dtype: torch.dtype, level: str) -> None:
    """Fault: ties not to even, a carry into the exponent lost, overflow not infinite, denormals rounded twice."""
    values = rounding_boundaries(dtype)
    values = values[values != 0]
    assert_bits("m", stored(values, dtype, level), values.to(dtype))
    if dtype is F16:  # a second opinion that shares no code with torch
        with np.errstate(over="ignore"):
            numpy_says = torch.from_numpy(values.numpy().astype(np.float16))
        assert_bits("m", stored(values, dtype, level), numpy_says)


@at_every_level
@of_both
def test_float_extremes(dtype: torch.dtype, level: str) -> None:
    """Fault: the largest and smallest floats, infinities and NaNs whose payload lies in the bits that are cut off."""
    words = np.array(
        [0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001]
    )
    values = bits32(words)
    expected = values.to(dtype)
    got = stored(values, dtype, level)
    same = expected != 0
    assert_bits("m", got[same], expected[same])
    assert bool((got[~same] == 0).all())
    nans = bits32(np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F80FFFF]))
    assert bool(stored(nans, dtype, level).isnan().all()), "a NaN became an infinity or a number"
