"""A small real model trained for 1,000 steps: ours reach the loss of plain torch, within the noise of seeds."""

from __future__ import annotations

import pytest
import torch
from family import ALL, ON_GPU

from benchmarks.convergence import OPTIONS, losses, peer

pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed (digits)")


@pytest.mark.parametrize("name", OPTIONS)
def test_reaches_the_loss_of_the_plain_formula(name: str, device: torch.device) -> None:
    """Fault: a small error in every step that no single step shows. The bound is the spread of three seeds."""
    if device.type == "cuda" and name not in ON_GPU:
        pytest.skip(f"{name} is for CPU parameters")
    theirs = [losses(peer(name), device, seed) for seed in range(3)]
    ours = losses(lambda params: ALL[name](params, **OPTIONS[name]), device, 0)
    last = [run[-1] for run in theirs]
    noise = max(max(last) - min(last), 0.05 * last[0])
    assert ours[-1] < 0.5 * ours[0] or ours[-1] < 0.05, "it trains at all"
    assert abs(ours[-1] - theirs[0][-1]) <= noise, (ours[-1], last)
