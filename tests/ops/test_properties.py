"""Properties of a step that hold for any input: found by hypothesis, the same examples in every run."""

from __future__ import annotations

import torch
from compare import assert_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from raw import COMBINATIONS, Tensors, copies, random_tensors, step_many
from reference import Hyper

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
sizes = st.integers(0, 70) | st.sampled_from([16_383, 16_384, 16_385])
combinations = st.sampled_from(COMBINATIONS)
seeds = st.integers(0, 2**31)
decays = st.sampled_from([0.0, 0.01, 0.5])
hypers = st.builds(
    Hyper,
    lr=st.floats(1e-6, 1.0),
    beta1=st.floats(0.0, 0.999),
    beta2=st.floats(0.0, 0.9999),
    eps=st.floats(1e-10, 1e-2),
    weight_decay=decays,
    adamw=st.booleans(),
    bias_correction=st.booleans(),
)


def some(n: int, combination: tuple[torch.dtype, ...], seed: int) -> Tensors:
    return random_tensors(n, combination, torch.Generator().manual_seed(seed))


@few
@given(n=sizes, combination=combinations, seed=seeds, h=hypers, step=st.integers(1, 10**6))
def test_zero_gradient_and_moments_leave_all_but_decay(
    n: int, combination: tuple[torch.dtype, ...], seed: int, h: Hyper, step: int
) -> None:
    """Fault: an update out of nothing. AdamW's decay is one float32 product and difference, rounded once more."""
    p = some(n, combination, seed)[0]
    zero_g, zero_s = torch.zeros(n, dtype=combination[1]), torch.zeros(n, dtype=combination[2])
    t = (p.clone(), zero_g, zero_s, zero_s.clone())
    h = Hyper(**{**h.__dict__, "weight_decay": h.weight_decay if h.adamw else 0.0})
    step_many([t], [step], h)
    decay = torch.tensor(h.lr * h.weight_decay, dtype=torch.float32)
    wide = p.float()
    assert_bits("p", t[0], (wide - decay * wide).to(p.dtype))
    assert not bool(t[2].any()) and not bool(t[3].any())


@few
@given(
    counts=st.lists(sizes, min_size=1, max_size=6),
    combination=combinations,
    seed=seeds,
    h=hypers,
    data=st.data(),
)
def test_order_of_tensors_changes_nothing(
    counts: list[int], combination: tuple[torch.dtype, ...], seed: int, h: Hyper, data: st.DataObject
) -> None:
    """Fault: one tensor's scalars, tail or chunk border reach its neighbour."""
    before = [some(n, combination, seed + i) for i, n in enumerate(counts)]
    order = data.draw(st.permutations(range(len(counts))))
    steps = [1 + 3 * i for i in range(len(counts))]
    straight, shuffled = [copies(t) for t in before], [copies(t) for t in before]
    step_many(straight, steps, h, threads=2)
    step_many([shuffled[i] for i in order], [steps[i] for i in order], h, threads=2)
    for a, b in zip(straight, shuffled, strict=True):
        for name, x, y in zip("pgmv", a, b, strict=True):
            assert_bits(name, x, y)


@few
@given(n=sizes, combination=combinations, seed=seeds, h=hypers, where=st.floats(0, 1))
def test_a_tensor_split_in_two_gives_equal_bits(
    n: int, combination: tuple[torch.dtype, ...], seed: int, h: Hyper, where: float
) -> None:
    """Fault: an element's result depends on whether it lies in a full vector or in the tail."""
    cut = int(where * n)
    whole, parts = some(n, combination, seed), some(n, combination, seed)
    step_many([whole], [5], h)
    halves = [tuple(x[:cut] for x in parts), tuple(x[cut:] for x in parts)]
    step_many(halves, [5, 5], h)  # type: ignore[arg-type]
    for name, x, y in zip("pgmv", whole, parts, strict=True):
        assert_bits(name, y, x)


@few
@given(n=sizes, combination=combinations, seed=seeds, h=hypers)
def test_same_input_same_bits(n: int, combination: tuple[torch.dtype, ...], seed: int, h: Hyper) -> None:
    """Fault: the spec says deterministic, and a step reads memory that it did not get."""
    a, b = some(n, combination, seed), some(n, combination, seed)
    step_many([a], [2], h, threads=2)
    step_many([b], [2], h, threads=1)
    for name, x, y in zip("pgmv", a, b, strict=True):
        assert_bits(name, x, y)
