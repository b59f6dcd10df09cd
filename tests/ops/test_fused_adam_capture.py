"""FusedAdam on a GPU in time: CUDA graphs, gradient scalers, streams, gradients that move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import assert_bits
from deepspeed_ops.op_builder.errors import UsageError
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ops.adam import FusedAdam

pytestmark = pytest.mark.gpu
SIZES = (5, 1025, 70_001)


class Pair:
    """The same parameters on the GPU under test and on the CPU, stepped eagerly there with equal gradients."""

    def __init__(self, rng: torch.Generator, **options: Any) -> None:
        cpu_options = {k: v for k, v in options.items() if k != "capturable"}
        if isinstance(cpu_options.get("lr"), Tensor):
            cpu_options["lr"] = float(cpu_options["lr"])
        self.cpu = [Parameter(torch.randn(n, generator=rng)) for n in SIZES]
        self.gpu = [Parameter(p.detach().cuda()) for p in self.cpu]
        self.gradients = [torch.randn(n, generator=rng) for n in SIZES]
        self.on_cpu = FusedAdam(self.cpu, **cpu_options)
        self.on_gpu = FusedAdam(self.gpu, **options)
        self.steps = 0

    def static_gradients(self) -> None:
        for p, g in zip(self.gpu, self.gradients, strict=True):
            p.grad = g.cuda()

    def reference_step(self, count: int = 1) -> None:
        for p, g in zip(self.cpu, self.gradients, strict=True):
            p.grad = g.clone()
        for _ in range(count):
            self.on_cpu.step()
            self.steps += 1

    def check(self) -> None:
        """Scalars come from the device's pow here, so a step may differ by a rounding or two: 2 eps (|p| + lr 10)."""
        torch.cuda.synchronize()
        assert [int(self.on_gpu.state[p]["step"]) for p in self.gpu] == [self.steps] * len(SIZES)
        eps = torch.finfo(torch.float32).eps
        for x, y in zip(self.cpu, self.gpu, strict=True):
            allowed = max(1, self.steps) * 2 * eps * (x.detach().abs() + 0.1)
            assert bool(((x.detach() - y.detach().cpu()).abs() <= allowed).all())


@pytest.fixture
def side_stream() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    yield stream
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


# ---- graphs -----------------------------------------------------------------------------------------------------


def test_capture_and_replay(rng: torch.Generator) -> None:
    """Fault: the captured step number, or a table that somebody overwrote, is replayed."""
    pair = Pair(rng, lr=0.01, weight_decay=0.1, capturable=True)
    pair.static_gradients()
    for _ in range(2):
        pair.on_gpu.step()
    graph = capture(pair.on_gpu.step)
    pair.reference_step(2)
    pair.check()  # capturing executes nothing
    for _ in range(5):
        graph.replay()
    pair.reference_step(5)
    pair.check()


def test_gradients_changed_in_place_between_replays(rng: torch.Generator) -> None:
    """Fault: values of the capture are replayed."""
    pair = Pair(rng, lr=0.01, capturable=True)
    pair.static_gradients()
    pair.on_gpu.step()
    graph = capture(pair.on_gpu.step)
    pair.reference_step()
    for _ in range(3):
        for p, i in zip(pair.gpu, range(len(SIZES)), strict=True):
            pair.gradients[i] = torch.randn(SIZES[i], generator=rng)
            assert p.grad is not None
            p.grad.copy_(pair.gradients[i])
        graph.replay()
        pair.reference_step()
    pair.check()


def test_eager_steps_between_replays(rng: torch.Generator) -> None:
    """Fault: an eager step whose gradients lie elsewhere rewrites the table that the graph reads."""
    pair = Pair(rng, lr=0.01, capturable=True)
    pair.static_gradients()
    pair.on_gpu.step()
    graph = capture(pair.on_gpu.step)
    static = [p.grad for p in pair.gpu]
    pair.reference_step()
    for _ in range(3):
        graph.replay()
        pair.reference_step()
        for p, g in zip(pair.gpu, pair.gradients, strict=True):
            p.grad = None
            p.grad = g.cuda()  # other memory: the static gradients are still held
        pair.on_gpu.step()
        pair.reference_step()
    pair.check()
    del static


def test_two_graphs_of_one_optimizer(rng: torch.Generator) -> None:
    """Fault: the second capture takes the first one's table away."""
    pair = Pair(rng, lr=0.01, capturable=True)
    pair.static_gradients()
    pair.on_gpu.step()
    first = capture(pair.on_gpu.step)
    old = [p.grad for p in pair.gpu]
    for p, g in zip(pair.gpu, pair.gradients, strict=True):
        p.grad = None
        p.grad = g.cuda()
    second = capture(pair.on_gpu.step)
    pair.reference_step()
    for graph in (first, second, second, first):
        graph.replay()
        pair.reference_step()
    pair.check()
    del old


def test_gradients_made_in_the_capture(rng: torch.Generator) -> None:
    """Fault: addresses of the graph's private pool are uploaded once, by the capture, and not by the replay."""
    pair = Pair(rng, lr=0.01, capturable=True)
    weights = [g.cuda() for g in pair.gradients]

    def step() -> None:
        for p in pair.gpu:
            p.grad = None
        loss = sum((p * w).sum() for p, w in zip(pair.gpu, weights, strict=True))
        assert isinstance(loss, Tensor)
        loss.backward()
        pair.on_gpu.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = capture(step)
    pair.reference_step(3)
    for _ in range(4):
        graph.replay()
        pair.reference_step()
    step()  # eager again
    pair.reference_step()
    graph.replay()
    pair.reference_step()
    pair.check()


def test_lr_tensor_changed_between_replays(rng: torch.Generator) -> None:
    """Fault: the learning rate of the capture is replayed."""
    lr = torch.tensor(0.01, device="cuda")
    pair = Pair(rng, lr=lr, capturable=True)
    pair.static_gradients()
    pair.on_gpu.step()
    graph = capture(pair.on_gpu.step)
    pair.reference_step()
    for value in (0.02, 0.005):
        lr.fill_(value)
        pair.on_cpu.param_groups[0]["lr"] = float(lr)
        graph.replay()
        pair.reference_step()
    pair.check()


def test_host_counted_capture_is_refused(rng: torch.Generator) -> None:
    """Fault: a graph that repeats the bias correction of one step for ever."""
    pair = Pair(rng, lr=0.01)
    pair.static_gradients()
    pair.on_gpu.step()
    with pytest.raises(UsageError, match="capturable=True"):
        capture(pair.on_gpu.step)
    pair.on_gpu.step()
    pair.reference_step(2)
    pair.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_capture_of_other_dtypes(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Fault: a kernel of another dtype is loaded for the first time inside the capture."""
    values, g = (torch.randn(1025, generator=rng).to("cuda", dtype) for _ in range(2))
    a, b = Parameter(values.clone()), Parameter(values.clone())
    captured, eager = FusedAdam([a], lr=0.01, capturable=True), FusedAdam([b], lr=0.01, capturable=True)
    a.grad, b.grad = g.clone(), g.clone()
    captured.step()
    graph = capture(captured.step)
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        eager.step()
    torch.cuda.synchronize()
    assert_bits("p", a, b)


def test_capturable_equals_host_counted(rng: torch.Generator) -> None:
    """Fault: two ways to count, two results."""
    a, b = Pair(rng, lr=0.01, weight_decay=0.1), Pair(rng, lr=0.01, weight_decay=0.1, capturable=True)
    for pair in (a, b):
        pair.static_gradients()
        for _ in range(5):
            pair.on_gpu.step()
        pair.reference_step(5)
        pair.check()


# ---- scalers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
def test_grad_scaler_skips_and_does_not_count(capturable: bool) -> None:
    """Fault: a step with an infinite gradient happens, counts, or waits for the device."""
    p, q = Parameter(torch.ones(1025, device="cuda")), Parameter(torch.ones(1025))
    a, b = FusedAdam([p], lr=0.1, capturable=capturable), FusedAdam([q], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=1000)
    for step in range(5):
        a.zero_grad()
        weight = float("inf") if step in (0, 3) else float(step + 1)
        scaler.scale((p * weight).sum()).backward()
        scaler.step(a)
        scaler.update()
        if step not in (0, 3):
            q.grad = torch.full((1025,), weight)
            b.step()
    torch.cuda.synchronize()
    assert int(a.state[p]["step"]) == 3
    assert float(scaler.get_scale()) == 256.0
    eps = torch.finfo(torch.float32).eps
    assert bool(((p.detach().cpu() - q.detach()).abs() <= 3 * 2 * eps * 1.3).all())


def test_grad_scaler_then_plain_steps() -> None:
    """Fault: counters that moved to the device for the scaler are lost when it goes."""
    p = Parameter(torch.ones(9, device="cuda"))
    optimizer = FusedAdam([p], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    p.grad = torch.ones(9, device="cuda")
    optimizer.step()
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    p.grad = torch.ones(9, device="cuda")
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 3
    assert torch.allclose(p, torch.full((9,), 0.7, device="cuda"), atol=1e-5)


# ---- streams and memory -----------------------------------------------------------------------------------------


def test_steps_on_two_streams(side_stream: torch.cuda.Stream, rng: torch.Generator) -> None:
    """Fault: launches or table uploads on another stream than the caller's."""
    pair = Pair(rng, lr=0.01, weight_decay=0.1)
    main = torch.cuda.current_stream()
    for i in range(6):
        stream, other = (side_stream, main) if i % 2 else (main, side_stream)
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # whoever does not wait for this stream runs ahead
            for p, g in zip(pair.gpu, pair.gradients, strict=True):
                p.grad = g.cuda() * 1.0
            pair.on_gpu.step()
        pair.reference_step()
    main.wait_stream(side_stream)
    pair.check()


def test_two_optimizers_on_two_streams(side_stream: torch.cuda.Stream, rng: torch.Generator) -> None:
    """Fault: shared launch arguments, overwritten while a launch that reads them is queued."""
    a, b = Pair(rng, lr=0.01), Pair(rng, lr=0.02)
    for pair in (a, b):
        pair.static_gradients()
    side_stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        a.on_gpu.step()
        with torch.cuda.stream(side_stream):
            b.on_gpu.step()
    torch.cuda.synchronize()
    for pair in (a, b):
        pair.reference_step(10)
        pair.check()


def test_gradients_that_move_at_every_step(rng: torch.Generator) -> None:
    """Fault: set_to_none frees gradients; the next ones lie elsewhere, and the table still has the old addresses."""
    pair = Pair(rng, lr=0.01, weight_decay=0.1)
    kept, addresses = [], set()
    for step in range(12):
        if step % 2:
            kept.extend(p.grad for p in pair.gpu)  # their memory stays taken: the next ones lie elsewhere
        pair.on_gpu.zero_grad(set_to_none=True)
        for p, g in zip(pair.gpu, pair.gradients, strict=True):
            p.grad = g.cuda() if step % 3 else torch.cat((g, g)).cuda()[: len(g)]
        assert pair.gpu[0].grad is not None
        addresses.add(pair.gpu[0].grad.data_ptr())
        pair.on_gpu.step()
        pair.reference_step()
    assert len(addresses) > 1
    pair.check()


def test_host_runs_ahead_of_a_busy_device(rng: torch.Generator) -> None:
    """Fault: pinned memory or launch arguments reused before the device has read them."""
    pair = Pair(rng, lr=0.01)
    torch.cuda._sleep(200_000_000)
    for _ in range(20):
        for p, g in zip(pair.gpu, pair.gradients, strict=True):
            p.grad = None
            p.grad = g.to("cuda", non_blocking=True).clone()
        pair.on_gpu.step()
    pair.reference_step(20)
    pair.check()


def test_a_step_does_not_wait(rng: torch.Generator) -> None:
    """Fault: a hidden synchronisation. With the sync debug mode on, torch raises at any of its own."""
    for options in ({}, {"capturable": True}, {"lr": torch.tensor(0.01, device="cuda")}):
        pair = Pair(rng, **options)
        pair.static_gradients()
        pair.on_gpu.step()
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)
        busy = torch.cuda.Event()
        busy.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                pair.on_gpu.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not busy.query(), "the step waited for the device"
        pair.reference_step(4)
        pair.check()


def test_no_device_memory_behind_torchs_back(rng: torch.Generator) -> None:
    """Fault: allocations that torch's statistics and memory limits do not see."""
    pair = Pair(rng, lr=0.01)
    pair.static_gradients()
    for _ in range(2):
        pair.on_gpu.step()
    torch.cuda.synchronize()
    free, allocated = torch.cuda.mem_get_info(0)[0], torch.cuda.memory_allocated()
    for _ in range(50):
        pair.on_gpu.step()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(0)[0] == free
    assert torch.cuda.memory_allocated() == allocated
