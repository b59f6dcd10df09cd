"""The ops of Lion, Adagrad, LAMB and the norm under torch's dispatcher: opcheck, and equal to the optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bits
from family import NEW
from torch.nn import Parameter

from deepspeed_ops import registry

OPS = registry.load_all()
SIZES = (5, 17, 1)


def arguments(name: str, device: torch.device | str, rng: torch.Generator) -> tuple[Any, ...]:
    """Valid arguments of an op."""
    p, g, m = ([torch.randn(n, generator=rng).to(device) for n in SIZES] for _ in range(3))
    v = [torch.rand(n, generator=rng).to(device) for n in SIZES]
    steps = [torch.zeros((), dtype=torch.int64) for _ in SIZES]
    made: dict[str, tuple[Any, ...]] = {
        "cpu_lion_": (p, g, m, steps, 0.01, 0.9, 0.99, 0.1),
        "cpu_adagrad_": (p, g, v, steps, 0.01, 1e-10, 0.1),
        "fused_lion_": (p, g, m, steps, None, 0.01, 0.9, 0.99, 0.1, None, None, None),
        "fused_lamb_": (
            p,
            g,
            m,
            v,
            steps,
            None,
            0.01,
            0.9,
            0.999,
            1e-6,
            0.1,
            10.0,
            0.01,
            False,
            True,
            None,
            None,
            None,
        ),
        "clip_grad_norm_": (g, 0.5),
        "flatten": (g,),
    }
    return made[name]


NAMES = ("cpu_lion_", "cpu_adagrad_", "fused_lion_", "fused_lamb_", "clip_grad_norm_", "flatten")


def test_names_are_those_of_the_registry() -> None:
    """Fault: an op that opcheck never sees. Adam's are checked in test_torch_integration.py."""
    assert {f"deepspeed::{name}" for name in NAMES} == {op for op in OPS if "adam" not in op}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a schema that lies about what is mutated, a missing fake kernel, a wrong autograd registration."""
    if device.type == "cuda" and name.startswith("cpu"):
        pytest.skip(f"{name} has no CUDA kernel")
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if torch.__version__.startswith(("2.4", "2.5")):
        utils.remove("test_aot_dispatch_dynamic")  # these releases cannot functionalise a mutated list
    torch.library.opcheck(getattr(torch.ops.deepspeed, name).default, arguments(name, device, rng), test_utils=utils)


@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("cpu_lion_", "DeepSpeedCPULion", {"betas": (0.9, 0.99), "weight_decay": 0.1}),
        ("fused_lion_", "FusedLion", {"betas": (0.9, 0.99), "weight_decay": 0.1}),
        ("cpu_adagrad_", "DeepSpeedCPUAdagrad", {"weight_decay": 0.1}),
        ("fused_lamb_", "FusedLamb", {"eps": 1e-6, "weight_decay": 0.1}),
    ],
)
def test_op_equals_optimizer(name: str, optimizer: str, options: dict[str, Any], rng: torch.Generator) -> None:
    """Fault: the function under the dispatcher and the optimizer drift apart."""
    p, g, *state = arguments(name, "cpu", rng)
    moments = state[: len(NEW[optimizer].moments)]
    steps, rest = state[len(moments)], state[len(moments) + 1 :]
    for some in moments:
        for x in some:
            x.zero_()
    params = [Parameter(x.clone()) for x in p]
    made = NEW[optimizer](params, lr=0.01, **options)
    for _ in range(3):
        getattr(torch.ops.deepspeed, name)(p, g, *moments, steps, *rest)
        for q, gradient in zip(params, g, strict=True):
            q.grad = gradient.clone()
        made.step()
    for x, q in zip(p, params, strict=True):
        assert_bits("p", x, q)
    assert [int(s) for s in steps] == [3, 3, 3]


@pytest.mark.parametrize("name", ["fused_lion_", "fused_lamb_"])
def test_fullgraph(name: str, rng: torch.Generator) -> None:
    """Fault: a graph break, or a functionalised op whose mutation is lost."""
    seed = rng.get_state()
    mine = arguments(name, "cpu", rng)
    rng.set_state(seed)
    theirs = arguments(name, "cpu", rng)
    op = getattr(torch.ops.deepspeed, name)

    def update(p: Any, g: Any, rest: Any) -> Any:
        op(p, [x * 2 for x in g], *rest)
        return sum((x.sum() for x in p), torch.zeros(()))

    compiled = torch.compile(update, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.allclose(compiled(*mine[:2], mine[2:]), update(*theirs[:2], theirs[2:]))
    torch._dynamo.reset()
    for x, y in zip(mine[0], theirs[0], strict=True):
        assert_bits("p", x, y)
