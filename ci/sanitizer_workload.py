"""What compute-sanitizer watches: every GPU op on small, odd and empty tensors of every dtype, eager and capturable.

``compute-sanitizer --tool=memcheck python ci/sanitizer_workload.py``, and ``--tool=racecheck`` (ci/gpu_suite.py).
``python ci/sanitizer_workload.py FILE`` saves what it computed: ci/gpu_sources.py compares that between compilers.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch

from deepspeed_ops import fused_adam
from deepspeed_ops.adam import FusedAdam
from deepspeed_ops.clip_grad_norm import clip_grad_norm_
from deepspeed_ops.lamb import FusedLamb
from deepspeed_ops.lion import FusedLion

SIZES = (1, 0, 5, 127, 513, 1027, 4099)


def main() -> None:
    """Run it; ends with the number of steps taken."""
    torch.manual_seed(3)
    steps, results = 0, {}
    for kind in (FusedAdam, FusedLion, FusedLamb):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for options in ({}, {"capturable": True}):
                params = [torch.nn.Parameter(torch.randn(n + 1, device="cuda").to(dtype)[1:]) for n in SIZES]
                params.append(torch.nn.Parameter(torch.randn(33, 65, device="cuda").to(dtype)))
                optimizer = kind(params, lr=1e-3, weight_decay=0.1, **options)
                for step in range(2):
                    for i, p in enumerate(params):
                        p.grad = torch.randn_like(p) if (i + step) % 4 else None
                    gradients = [p.grad for p in params if p.grad is not None]
                    clip_grad_norm_([p for p in params if p.grad is not None], 1.0)
                    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
                    fused_adam.multi_tensor_check_finite(flag, gradients)
                    optimizer.step()
                    steps += 1
                for i, p in enumerate(params):
                    state = {k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
                    for key, value in {"p": p.detach(), **state}.items():
                        results[f"{kind.__name__} {dtype} {'capturable ' if options else ''}{i} {key}"] = value.cpu()
    torch.cuda.synchronize()
    if sys.argv[1:]:
        torch.save(results, sys.argv[1])
    sys.stdout.write(f"{steps} steps\n")


if __name__ == "__main__":
    main()
