"""Every way to the same kernels gives the same bits: host library or Python launcher, nvcc or NVRTC, cubin or PTX."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_bits
from deepspeed_ops.op_builder.choose import device_compilers
from deepspeed_ops.op_builder.compile import build_part
from deepspeed_ops.op_builder.driver import Driver, Kernels
from deepspeed_ops.op_builder.host import detect
from deepspeed_ops.op_builder.loader import HOME
from deepspeed_ops.op_builder.matrix import load
from deepspeed_ops.op_builder.plan import package_version, plan_device
from deepspeed_ops.op_builder.settings import Settings
from deepspeed_ops.op_builder.spec import get_spec
from deepspeed_ops.op_builder.store import Store
from deepspeed_ops.op_builder.targets import Target
from deepspeed_ops.op_builder.toolchain import Nvcc, Nvrtc, Toolchain, discover_gpu
from torch.nn import Parameter

from deepspeed_ops import fused_adam, launch, table_op, tensor_table
from deepspeed_ops.adam import FusedAdam
from deepspeed_ops.launch import PythonLauncher

OP = "fused_adam"
TARGETS = sorted(
    {Target(*c, kind) for c, a in load().archs.items() if a.ship and c <= (9, 0) for kind in ("sass", "ptx")}
)


@functools.cache
def toolchain() -> Toolchain:
    settings = Settings.read()
    return discover_gpu(settings, detect(settings.env))


def compilers_of(target: Target, kind: type, newest: tuple[int, int] = (99, 0)) -> list[Any]:
    return [
        c
        for c in device_compilers(toolchain())
        if isinstance(c, kind) and c.targets(target) and c.version[:2] <= newest
    ]


def build(target: Target, compiler: Nvcc | Nvrtc, root: Path) -> bytes:
    """An image as the driver takes it, by the plan that wheels and the JIT follow."""
    part = plan_device(get_spec(OP), target, compiler, HOME / "csrc", package_version(HOME))
    made = build_part(part, Store(root, "jit"), Settings.read()).path.read_bytes()
    return made if target.kind == "sass" else made + b"\0"


def steps_with(monkeypatch: pytest.MonkeyPatch, launcher: Any) -> list[torch.Tensor]:
    """What a launcher makes of fixed inputs: every kernel, dtype and way of counting."""
    monkeypatch.setattr(launch, "launcher", lambda op: launcher)
    table_op._tables.clear()
    rng = torch.Generator().manual_seed(3)
    results = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for options in ({}, {"capturable": True}, {"adam_w_mode": False}):
            params = [Parameter(torch.randn(n, generator=rng).to("cuda", dtype)) for n in (1, 5, 1027, 0)]
            params.append(Parameter(torch.ones(3, 5, 7, 9, device="cuda", dtype=dtype)))
            optimizer = FusedAdam(params, lr=0.01, weight_decay=0.1, **options)  # type: ignore[arg-type]
            for step in range(4):
                for i, p in enumerate(params):
                    present = (step + i) % 3  # unlike steps, so that coefficients are per tensor
                    p.grad = torch.randn(p.shape, generator=rng).to("cuda", dtype) if present else None
                optimizer.step()
            results += [p.detach().clone() for p in params]
            results += [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        gradients = [torch.ones(1027, device="cuda", dtype=dtype)]
        fused_adam.multi_tensor_check_finite(flag, gradients)
        results.append(flag.clone())
        gradients[0][1026] = float("inf")
        fused_adam.multi_tensor_check_finite(flag, gradients)
        results.append(flag)
    assert [int(r) for r in results if r.dtype is torch.int32] == [0, 1] * 4
    torch.cuda.synchronize()
    table_op._tables.clear()
    return results


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], same_pow: bool = True) -> None:
    """Equal bits; where compilers' libraries have unlike ``pow``, device-counted steps of 0.01 may differ by ulps."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        device_counted = i % 32 // 10 == 1  # 3 ways of counting give 5 parameters and 5 moments each, then 2 flags
        if same_pow or not device_counted:
            assert_bits(f"result {i}", x, y)
        else:
            eps = torch.finfo(x.dtype).eps
            assert torch.allclose(x, y, rtol=2 * eps, atol=8 * eps * 0.01, equal_nan=True), f"result {i}"


@pytest.fixture
def normal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Results of the launcher that users get."""
    real = launch.launcher(OP)
    assert not isinstance(real, PythonLauncher), "the host library did not build"
    yield steps_with(monkeypatch, real)


@pytest.mark.gpu
def test_python_launcher_gives_equal_bits(normal: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a structure of the kernel's parameters that is laid out otherwise in Python, or other scalars."""
    assert_equal(steps_with(monkeypatch, PythonLauncher(OP)), normal)


@pytest.mark.gpu
def test_without_the_exchange_table(normal: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the checks in Python, which torch before 2.9 gets, accept or pack something else."""
    real = launch.launcher(OP)
    monkeypatch.setattr(tensor_table, "can_collect", lambda: False)
    assert_equal(steps_with(monkeypatch, real), normal)


@pytest.mark.gpu
@pytest.mark.parametrize("target", [t for t in TARGETS if t.kind == "ptx"], ids=lambda t: t.variant)
def test_ptx_of_every_arch(
    target: Target, normal: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault: a branch for older architectures (__CUDA_ARCH__) that nobody has ever run."""
    driver = Driver.open()
    if not target.runs_on(driver.device(0).capability):
        pytest.skip(f"{target.variant} does not run on {driver.device(0).capability}")
    found = compilers_of(target, Nvrtc, driver.version)
    if not found:
        pytest.skip(f"no NVRTC here makes {target.code}; see ci/matrix.toml for one that does")
    launcher = PythonLauncher(OP)
    launcher._kernels[0] = Kernels(build(target, found[0], tmp_path), 0)
    assert_equal(steps_with(monkeypatch, launcher), normal, same_pow=False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Nvcc, Nvrtc], ids=["nvcc", "nvrtc"])
def test_cubin_of_every_compiler_here(
    kind: type, normal: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault: nvcc and NVRTC, or two releases of them, contract or round differently."""
    driver = Driver.open()
    target = Target(*driver.device(0).capability)
    found = [c for c in compilers_of(target, kind) if c.version[0] <= driver.version[0]]
    if not found:
        pytest.skip(f"no {kind.__name__.lower()} here makes {target.code}")
    for compiler in found:
        launcher = PythonLauncher(OP)
        launcher._kernels[0] = Kernels(build(target, compiler, tmp_path), 0)
        assert_equal(steps_with(monkeypatch, launcher), normal, same_pow=False)
