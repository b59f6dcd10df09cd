"""Times DeepSpeed's own CPU optimizers; run by a Python that has DeepSpeed installed:
``deepspeed_peer.py ELEMENTS DTYPE [adam|lion|adagrad]``.

Prints one JSON line. Builds DeepSpeed's op on the first run.
"""

import importlib
import json
import statistics
import sys
import time

import torch

n, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
generator = torch.Generator().manual_seed(0)
p = torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype))
p.grad = torch.randn(n, generator=generator).to(dtype)
kind = sys.argv[3] if len(sys.argv) > 3 else "adam"
name = {"adam": "DeepSpeedCPUAdam", "lion": "DeepSpeedCPULion", "adagrad": "DeepSpeedCPUAdagrad"}[kind]
optimizer = getattr(importlib.import_module(f"deepspeed.ops.{kind}"), name)([p], lr=1e-3, weight_decay=0.01)
times = []
for i in range(22):
    start = time.perf_counter()
    optimizer.step()
    if i >= 2:
        times.append((time.perf_counter() - start) * 1e6)
print(json.dumps({"us": round(statistics.median(times), 1), "threads": torch.get_num_threads()}))
