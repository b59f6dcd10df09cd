"""Valid arguments of every op of the registry, for the tests that walk all of them."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_ops import registry

OPS = registry.load_all()
ADAM_OPS = ("deepspeed::cpu_adam_", "deepspeed::fused_adam_")
NONE = (None, None, None)
LAMB = (10.0, 0.01, False, True)  # max_coeff, min_coeff, eps_inside_sqrt, bias_correction
SCALARS = (1e-2, 0.9, 0.999, 1e-8, 0.1, True, True)


def arguments(
    name: str, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> tuple[Any, ...]:
    """Valid arguments of an op of the registry. A new op adds its own here: opcheck below walks all of them."""
    sizes = (5, 17, 1)
    p, g, m = ([torch.randn(n, generator=generator).to(device) for n in sizes] for _ in range(3))
    v = [torch.rand(n, generator=generator).to(device) for n in sizes]
    steps = [torch.zeros((), dtype=torch.int64) for _ in sizes]
    made = {
        "deepspeed::cpu_adam_": (p, g, m, v, steps, *SCALARS),
        "deepspeed::fused_adam_": (p, g, m, v, steps, None, *SCALARS, None, None, None),
        "deepspeed::cpu_lion_": (p, g, m, steps, 1e-2, 0.9, 0.99, 0.1),
        "deepspeed::fused_lion_": (p, g, m, steps, None, 1e-2, 0.9, 0.99, 0.1, None, None, None),
        "deepspeed::cpu_adagrad_": (p, g, v, steps, 1e-2, 1e-10, 0.1),
        "deepspeed::fused_lamb_": (
            p,
            g,
            m,
            v,
            steps,
            None,
            1e-2,
            0.9,
            0.999,
            1e-8,
            0.1,
            10.0,
            0.01,
            False,
            True,
            *NONE,
        ),
        "deepspeed::clip_grad_norm_": (g, 1.0),
        "deepspeed::flatten": (p,),
    }
    return made[name]


def op_named(name: str) -> Any:
    return getattr(torch.ops.deepspeed, name.partition("::")[2]).default
