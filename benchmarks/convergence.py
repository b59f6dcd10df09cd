"""Every optimizer beside its plain formula in torch: 1,000 steps of a small classifier from equal seeds.

``results/convergence.json`` holds the losses; docs/convergence.md draws them. tests/ops/test_optimizer_training.py
asserts that ours end where the plain formula does, within the noise of seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from deepspeed_ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_ops.lamb import FusedLamb
from deepspeed_ops.lion import DeepSpeedCPULion, FusedLion

CLASSES = (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb)
EVERY = 20
STEPS = 1000
OPTIONS: dict[str, dict[str, Any]] = {
    "FusedAdam": {"lr": 1e-3, "weight_decay": 0.01},
    "DeepSpeedCPUAdam": {"lr": 1e-3, "weight_decay": 0.01},
    "FusedLion": {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "DeepSpeedCPULion": {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "DeepSpeedCPUAdagrad": {"lr": 1e-2, "weight_decay": 1e-4},
    "FusedLamb": {"lr": 1e-2, "weight_decay": 0.01},
}


class Plain(torch.optim.Optimizer):
    """Lion and LAMB as their papers write them, in torch (which has neither). LAMB's ratio clamped as DeepSpeed's."""

    def __init__(self, params: Any, kind: str, **options: Any) -> None:
        super().__init__(params, {"betas": (0.9, 0.999), "eps": 1e-8, **options})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                getattr(self, self.kind)(p, p.grad, state, group)

    @staticmethod
    def lion(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        beta1, beta2 = group["betas"]
        c = beta1 * state["m"] + (1 - beta1) * g
        p.sub_(group["lr"] * (c.sign() + group["weight_decay"] * p))
        state["m"].mul_(beta2).add_(g, alpha=1 - beta2)

    @staticmethod
    def lamb(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        beta1, beta2 = group["betas"]
        state["m"].mul_(beta1).add_(g, alpha=1 - beta1)
        state["v"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = state["m"] / (state["v"].sqrt() + group["eps"]) + group["weight_decay"] * p
        norms = float(p.norm()), float(u.norm())
        ratio = min(max(norms[0] / norms[1], 0.01), 10.0) if all(norms) else 1.0
        size = group["lr"] * (1 - beta2 ** state["t"]) ** 0.5 / (1 - beta1 ** state["t"])
        p.sub_(size * ratio * u)


def peer(name: str) -> Callable[[Any], Any]:
    options = OPTIONS[name]
    if "Adam" in name:
        return lambda params: torch.optim.AdamW(params, **options)
    if "Adagrad" in name:
        return lambda params: torch.optim.Adagrad(params, **options)
    return lambda params: Plain(params, "lion" if "Lion" in name else "lamb", **options)


def digits(device: torch.device) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32, device=device) / 16
    return x, torch.tensor(data.target, device=device)


def losses(make: Callable[[Any], Any], device: torch.device, seed: int, every: int = 100) -> list[float]:
    """Loss over all data every so many steps of a small classifier of scikit-learn's digits."""
    x, y = digits(device)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).to(device)
    optimizer = make(model.parameters())
    order = torch.Generator().manual_seed(seed)
    seen = []
    for step in range(1, STEPS + 1):
        batch = torch.randint(0, len(x), (64,), generator=order).to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                seen.append(float(torch.nn.functional.cross_entropy(model(x), y)))
    return seen


def run(folder: Path | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Train all of them on the CPU; ``quick`` leaves the fused ones out."""
    cpu = torch.device("cpu")
    facts, records = record.where(cpu), []
    for kind in CLASSES:
        name = kind.__name__
        if quick and name.startswith("Fused"):
            continue
        theirs = losses(peer(name), cpu, 0, EVERY)
        ours = losses(lambda params, kind=kind, name=name: kind(params, **OPTIONS[name]), cpu, 0, EVERY)
        base = {"op": "convergence", "case": name, "dtype": "float32", "every": EVERY}
        records.append({**base, "ours": [round(x, 6) for x in ours], "plain": [round(x, 6) for x in theirs], **facts})
    record.save("convergence", records, folder)
    rows = [(r["case"], f"{r['ours'][-1]:.5f}", f"{r['plain'][-1]:.5f}") for r in records]
    record.table("loss after 1,000 steps", rows, ("optimizer", "ours", "plain formula"))
    return records
