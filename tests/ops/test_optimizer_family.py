"""Lion, Adagrad and LAMB as torch optimizers: groups, state, checkpoints, schedulers, scalers, compile, graphs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from compare import assert_bits
from deepspeed_ops.op_builder.errors import DtypeError, TensorError, UsageError
from family import ALL, NEW, ON_GPU, give, parameters, twins
from torch.nn import Parameter

each = pytest.mark.parametrize("name", NEW)
every = pytest.mark.parametrize("name", ALL)


def runs_on(name: str, device: torch.device) -> None:
    if device.type == "cuda" and name not in ON_GPU:
        pytest.skip(f"{name} is for CPU parameters")


@each
def test_groups_have_their_own_options(name: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: one group's lr used for all; a group added later left out."""
    runs_on(name, device)
    params = parameters(rng, device)
    alone = twins(params)
    optimizer = NEW[name]([{"params": params[:2], "lr": 0.1}, {"params": params[2:4]}], lr=0.01, weight_decay=0.1)
    optimizer.add_param_group({"params": params[4:], "lr": 0.2, "weight_decay": 0.0})
    rates = [(0.1, 0.1)] * 2 + [(0.01, 0.1)] * 2 + [(0.2, 0.0)]
    singles = [NEW[name]([p], lr=lr, weight_decay=wd) for p, (lr, wd) in zip(alone, rates, strict=True)]
    for _ in range(3):
        give(params, rng)
        for p, q, single in zip(params, alone, singles, strict=True):
            q.grad = p.grad
            single.step()
        optimizer.step()
    for p, q in zip(params, alone, strict=True):
        assert_bits("p", p, q)


@each
def test_lr_scheduler_and_closure(name: str, rng: torch.Generator) -> None:
    """Fault: scalars kept from the first step; the closure's loss lost, or computed without gradients."""
    params = parameters(rng)
    others = twins(params)
    a, b = NEW[name](params, lr=0.1), NEW[name](others, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(a, 1, gamma=0.5)
    for i in range(3):

        def closure() -> torch.Tensor:
            a.zero_grad()
            loss = sum((p.square().sum() for p in params), torch.zeros(()))
            loss.backward()
            return loss

        assert float(a.step(closure)) > 0
        b.param_groups[0]["lr"] = 0.1 * 0.5**i
        for q in others:
            q.grad = 2 * q.detach()
        b.step()
        scheduler.step()
    for p, q in zip(params, others, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bit_equal(name: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a state that loses its dtype or its step on the way through a file."""
    runs_on(name, device)
    params = parameters(rng, device, dtype)
    optimizer = ALL[name](params, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        give(params, rng)
        optimizer.step()
    others = twins(params)
    resumed = ALL[name](others, lr=0.5)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    dtypes = {k: v.dtype for k, v in saved["state"][0].items() if k != "step"}
    resumed.load_state_dict(saved)
    for key, kind in dtypes.items():
        assert resumed.state[others[0]][key].dtype is kind
    for _ in range(3):
        give(params, rng)
        for p, q in zip(params, others, strict=True):
            q.grad = p.grad
        optimizer.step()
        resumed.step()
    for p, q in zip(params, others, strict=True):
        assert_bits("p", p, q)
        assert int(optimizer.state[p]["step"]) == int(resumed.state[q]["step"]) == 6


@each
def test_pickle_and_deepcopy(name: str, rng: torch.Generator) -> None:
    """Fault: a copy that shares tables with the original, or cannot step."""
    params = parameters(rng)
    optimizer = NEW[name](params, lr=0.1)
    give(params, rng)
    optimizer.step()
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        mine = clone.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        for p, q in zip(params, mine, strict=True):
            q.grad = p.grad
        clone.step()
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
        assert not torch.equal(mine[0], params[0])


@each
def test_missing_gradients_and_counters(name: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: one counter for all parameters (DeepSpeed), or a parameter without gradient that decays."""
    runs_on(name, device)
    params = parameters(rng, device)
    optimizer = NEW[name](params, lr=0.1, weight_decay=0.5)
    for step in range(4):
        give(params, rng)
        if step % 2:
            params[1].grad = None
        before = params[1].detach().clone()
        optimizer.step()
        assert torch.equal(params[1], before) is bool(step % 2)
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 2, 4, 4, 4]


@each
def test_channels_last_and_strided_gradients(name: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a gradient's memory read in the order of its parameter."""
    runs_on(name, device)
    values, g = (torch.randn(2, 3, 4, 5, generator=rng).to(device) for _ in range(2))
    a, b = Parameter(values.to(memory_format=torch.channels_last)), Parameter(values.clone())
    oa, ob = NEW[name]([a], lr=0.1), NEW[name]([b], lr=0.1)
    for layout in (torch.channels_last, torch.contiguous_format):
        a.grad, b.grad = g.contiguous(memory_format=layout), g.clone()
        oa.step()
        ob.step()
    # LAMB's norms are sums in the order of memory.
    assert torch.allclose(a, b, rtol=1e-6) if name == "FusedLamb" else torch.equal(a, b)


@every
def test_gradient_scaler(name: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: gradients used with the scale on them; a step with infinities taken or counted."""
    runs_on(name, device)
    params = parameters(rng, device)
    others = twins(params)
    a, b = ALL[name](params, lr=0.1), ALL[name](others, lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=1000)
    for bad in (False, True, False):
        give(others, rng)
        for p, q in zip(params, others, strict=True):
            p.grad = q.grad * scaler.get_scale()
        if bad:
            params[0].grad[0, 0] = float("inf")
        scaler._lazy_init_scale_growth_tracker(device) if scaler._scale is None else None
        scaler.step(a)
        scaler.update()
        if not bad:
            b.step()
    for p, q in zip(params, others, strict=True):
        assert_bits("p", p, q)
        assert int(a.state[p]["step"]) == 2


@each
def test_compiled_step(name: str, rng: torch.Generator) -> None:
    """Fault: dynamo traces into the step and bakes addresses or the step number in."""
    model = torch.nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 4, generator=rng)
    a, b = NEW[name](model.parameters(), lr=0.05), NEW[name](twin.parameters(), lr=0.05)

    def train(m: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        m(x).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="aot_eager")
    for _ in range(3):
        compiled(model, a)
        train(twin, b)
    torch._dynamo.reset()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@each
@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("lr", -1.0, UsageError), ("lr", "0.1", DtypeError), ("lr", float("nan"), UsageError),
        ("weight_decay", -0.1, UsageError), ("weight_decay", None, DtypeError), ("lr", True, None),
    ],
)  # fmt: skip
def test_bad_options(name: str, option: str, value: Any, error: Any) -> None:
    """Fault: a typo in a scalar found after an hour of training."""
    p = Parameter(torch.ones(3))
    if error is None:
        return
    with pytest.raises(error, match=option):
        NEW[name]([p], **{option: value})


@each
def test_tensors_that_cannot_be_updated(name: str) -> None:
    """Fault: a copy is updated and the user's tensor is not; two parameters in one piece of memory."""
    strided = Parameter(torch.ones(4, 6)[:, ::2])
    strided.grad = torch.ones(4, 3)
    with pytest.raises(TensorError, match="strides"):
        NEW[name]([strided]).step()
    room = torch.ones(10)
    a, b = Parameter(torch.ones(1)), Parameter(torch.ones(1))
    a.data, b.data = room[:6], room[5:]
    a.grad, b.grad = torch.ones(6), torch.ones(5)
    with pytest.raises(TensorError, match="overlap"):
        NEW[name]([a, b]).step()
    p = Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises((DtypeError, TensorError)):
        NEW[name]([p]).step()
    if name != "DeepSpeedCPUAdagrad":
        q = Parameter(torch.ones(3, 2))
        q.grad = torch.ones(3, 2).to_sparse()
        with pytest.raises(TensorError, match="sparse"):
            NEW[name]([q]).step()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FusedLion", "FusedLamb"])
def test_cpu_class_equals_gpu_class(name: str, rng: torch.Generator) -> None:
    """Fault: two devices, two results. Lion: equal bits; LAMB: 2 eps (|p| + |step|) a step."""
    params = parameters(rng, "cuda")
    others = [Parameter(p.detach().cpu()) for p in params]
    a, b = (NEW[name](x, lr=0.01, weight_decay=0.1) for x in (params, others))
    for step in range(1, 6):
        give(others, rng)
        for p, q in zip(params, others, strict=True):
            p.grad = q.grad.cuda()
        a.step()
        b.step()
        for p, q in zip(params, others, strict=True):
            if name == "FusedLion":
                assert_bits("p", p, q)
            else:
                assert torch.allclose(p.cpu(), q, rtol=step * 2.4e-7, atol=step * 2.4e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("lr_on_device", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["FusedLion", "FusedLamb"])
def test_cuda_graph(name: str, lr_on_device: bool, rng: torch.Generator) -> None:
    """Fault: a replay that repeats the first step's scalars, or reads addresses of before."""
    params = parameters(rng, "cuda")
    others = twins(params)
    lr = torch.tensor(0.01, device="cuda") if lr_on_device else 0.01
    a = NEW[name](params, lr=lr, weight_decay=0.1, capturable=True)
    b = NEW[name](others, lr=0.01, weight_decay=0.1)
    give(params, rng)
    static = [p.grad for p in params]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a.step()
    torch.cuda.current_stream().wait_stream(side)
    for q, g in zip(others, static, strict=True):
        q.grad = g.clone()
    b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for step in range(3):
        if lr_on_device:
            lr.fill_(0.01 / (step + 1))
            b.param_groups[0]["lr"] = float(lr)
        for g, q in zip(static, others, strict=True):
            g.copy_(torch.randn(g.shape, generator=rng))
            q.grad = g.clone()
        graph.replay()
        b.step()
    torch.cuda.synchronize()
    for p, q in zip(params, others, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
        assert int(a.state[p]["step"]) == 4
    if name == "FusedLamb":
        assert torch.allclose(torch.tensor(a.get_lamb_coeffs()), torch.tensor(b.get_lamb_coeffs()), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["FusedLion", "FusedLamb"])
def test_python_launcher_gives_equal_bits(
    name: str, dtype: torch.dtype, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: another result on a machine without a C++ compiler."""
    from deepspeed_ops import launch

    op = {"FusedLion": "fused_lion", "FusedLamb": "fused_lamb"}[name]
    params = parameters(rng, "cuda", dtype)
    others = twins(params)
    for p, q in zip(params, others, strict=True):
        p.grad = torch.randn(p.shape, generator=rng).to("cuda", dtype)
        q.grad = p.grad.clone()
    NEW[name](params, lr=0.01, weight_decay=0.1).step()
    launcher = launch.PythonLauncher(op)
    monkeypatch.setattr(launch, "launcher", lambda _: launcher)
    NEW[name](others, lr=0.01, weight_decay=0.1).step()
    for p, q in zip(params, others, strict=True):
        assert_bits("p", p, q)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("name", ["FusedLion", "FusedLamb"])
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """Fault: an index in 32 bits (DeepSpeed's LAMB refuses, its Lion is wrong)."""
    n = 2**31 + 1025
    p = Parameter(torch.ones(n, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.full((n,), 0.5, device="cuda", dtype=torch.bfloat16)
    optimizer = NEW[name]([p], lr=0.25)
    optimizer.step()
    first = p[0].item()
    assert first < 1.0
    assert bool((p[-2000:] == first).all()) and bool((p[2**31 - 5 : 2**31 + 5] == first).all())
    if name == "FusedLamb":  # |p| = sqrt(n), |u| = sqrt(n) * m / (sqrt(v) + eps)
        ratio = optimizer.get_lamb_coeffs()[0]
        u = 0.05 / (float(torch.tensor(0.00025).bfloat16()) ** 0.5)
        assert abs(ratio - 1 / u) < 0.02 / u
