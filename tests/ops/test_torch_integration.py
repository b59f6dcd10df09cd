"""How the ops behave inside torch: opcheck, compile, fake tensors, functorch, subclasses, modes, version counters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import assert_bits
from deepspeed_ops.op_builder.errors import OpsError
from deepspeed_ops.op_builder.spec import all_specs
from op_arguments import ADAM_OPS, OPS, arguments, op_named
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ops import registry
from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_ops.cpu_adam import adam_update, create_adam, destroy_adam


def test_registry_walks_every_schema() -> None:
    """Fault: an op that opcheck never sees."""
    assert set(OPS) == {f"deepspeed::{n}" for s in all_specs().values() for n in s.schemas}


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, device: torch.device, rng: torch.Generator) -> None:
    """Fault: a schema that lies about what is mutated, a missing fake kernel, a wrong autograd registration."""
    if device.type == "cuda" and "cpu" in name:
        pytest.skip(f"{name} has no CUDA kernel")
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if torch.__version__.startswith(("2.4", "2.5")):
        utils.remove("test_aot_dispatch_dynamic")  # these releases cannot functionalise a mutated list
    torch.library.opcheck(op_named(name), arguments(name, device, rng), test_utils=utils)


@pytest.mark.parametrize("name", ADAM_OPS)
def test_op_equals_optimizer(name: str, rng: torch.Generator) -> None:
    """Fault: the function under the dispatcher and the optimizer drift apart."""
    p, g, m, v, steps, *rest = arguments(name, generator=rng)
    params = [Parameter(x.clone()) for x in p]
    optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
    for x in (*m, *v):
        x.zero_()
    for _ in range(3):
        op_named(name)(p, g, m, v, steps, *rest)
        for q, gradient in zip(params, g, strict=True):
            q.grad = gradient.clone()
        optimizer.step()
    for x, q in zip(p, params, strict=True):
        assert_bits("p", x, q)
    assert [int(s) for s in steps] == [3, 3, 3]


# ---- compile ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_compiled_training_step(cls: Any) -> None:
    """Fault: dynamo traces into the step and bakes addresses or the step number in."""

    def train(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = cls(model.parameters(), lr=0.05)
        x = torch.linspace(-1, 1, 32).reshape(8, 4)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss

        wrapped = wrap(step)
        for _ in range(5):
            wrapped()
        assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [5] * 4
        return [p.detach().clone() for p in model.parameters()]

    plain, compiled = train(lambda f: f), train(lambda f: torch.compile(f, backend="aot_eager"))
    for a, b in zip(plain, compiled, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPS)
def test_fullgraph(name: str, backend: str, rng: torch.Generator) -> None:
    """Fault: a graph break, or a functionalised op whose mutation or result is lost."""
    op = op_named(name)
    generator = rng.get_state()
    given = arguments(name, generator=rng)
    rng.set_state(generator)
    expected = arguments(name, generator=rng)
    lists = [x for x in given if isinstance(x, list)]
    rest = [x for x in given if not isinstance(x, list)]

    def update(*lists: list[Tensor]) -> Tensor:
        result = op(*lists, *rest)
        total = sum((x.sum() for x in lists[0]), torch.zeros(()))
        return total if result is None else total + result.sum()

    compiled = torch.compile(update, backend=backend, fullgraph=True)
    for _ in range(3):
        got, want = compiled(*lists), update(*(x for x in expected if isinstance(x, list)))
        assert torch.allclose(got, want)
    for mine, theirs in zip(lists, (x for x in expected if isinstance(x, list)), strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert_bits("compiled", x, y)


# ---- fake tensors, functorch, subclasses ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAM_OPS)
def test_fake_tensors(name: str) -> None:
    """Fault: the kernel runs on a tensor without memory."""
    with FakeTensorMode():
        result = op_named(name)(*arguments(name))
        returns = op_named(name)._schema.returns
        assert (result is None) == (not returns) and (
            result is None or isinstance(result, torch._subclasses.FakeTensor)
        )


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_optimizer_under_fake_tensors(cls: Any) -> None:
    """Fault: a memory estimate of a training step, run with fake tensors, crashes in the optimizer."""
    with FakeTensorMode():
        p = Parameter(torch.ones(4))
        p.grad = torch.ones(4)
        optimizer = cls([p])
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].shape == (4,)


@pytest.mark.parametrize("name", ADAM_OPS)
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_functorch(name: str, transform: str) -> None:
    """Fault: a transform's wrapper is used by address. The right result or an error, and real memory intact."""
    p, g, m, v, steps, *rest = arguments(name)
    for x in (*m, *v):
        x.zero_()
    before = [x.clone() for x in p]
    expected, zeros = [x.clone() for x in p], [x.clone() for x in m]
    op_named(name)(expected, g, zeros, [x.clone() for x in v], [s.clone() for s in steps], *rest)

    def inner(x: Tensor) -> Tensor:
        op_named(name)(p[:1], [x], m[:1], v[:1], steps[:1], *rest)
        return x.sum()

    runs: dict[str, Callable[[], object]] = {
        "vmap": lambda: torch.func.vmap(inner)(torch.stack((g[0], 2 * g[0]))),
        "grad": lambda: torch.func.grad(inner)(g[0]),
        "jvp": lambda: torch.func.jvp(inner, (g[0],), (g[0],)),
    }
    refused = False
    try:
        runs[transform]()
    except (RuntimeError, ValueError, TypeError):
        refused = True
    assert_bits("p", p[0], before[0] if refused else expected[0])
    if transform == "vmap":
        assert refused, "one parameter cannot follow two gradients"


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_optimizer_inside_a_transform(transform: str) -> None:
    """Fault: as above, through the optimizer: SystemError, or a step with a wrapper's address."""

    def inner(x: Tensor) -> Tensor:
        p = Parameter(torch.zeros(5))
        p.grad = x
        FusedAdam([p], lr=0.5).step()
        return (p * x).sum()

    try:
        if transform == "vmap":
            result = torch.func.vmap(inner)(torch.ones(2, 5))
        else:
            result = torch.func.grad(inner)(torch.ones(5))
    except SystemError:
        raise
    except (RuntimeError, ValueError, TypeError):
        return
    assert torch.allclose(result, torch.full_like(result, -2.5 if transform == "vmap" else -0.5))


class Wrapper(torch.Tensor):
    """A wrapper subclass: its own storage holds nothing, the data are inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        return torch.utils._pytree.tree_map(
            lambda x: Wrapper(x) if isinstance(x, Tensor) else x,
            func(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {})),
        )


@pytest.mark.parametrize("name", ADAM_OPS)
def test_wrapper_subclass_through_the_dispatcher(name: str, rng: torch.Generator) -> None:
    """Fault: DTensor and its kind never get to say what an op means for them."""
    p, g, m, v, steps, *rest = arguments(name, generator=rng)
    expected = [x.clone() for x in p]
    op_named(name)(expected, g, [x.clone() for x in m], [x.clone() for x in v], [s.clone() for s in steps], *rest)
    wrapped = [[Wrapper(x) for x in xs] for xs in (p, g, m, v)]
    op_named(name)(*wrapped, steps, *rest)
    for x, want in zip(p, expected, strict=True):
        assert_bits("inner p", x, want)


def test_wrapper_subclass_as_parameter() -> None:
    """Fault: a wrapper's empty memory is updated by address. Right result or an error that names it."""
    inner = torch.ones(4)
    p = Parameter(Wrapper(inner))
    p.grad = Wrapper(torch.ones(4))
    try:
        FusedAdam([p], lr=0.1).step()
    except OpsError as refusal:
        assert "Wrapper" in str(refusal) or "Parameter" in str(refusal)
        assert bool((inner == 1).all())
    else:
        assert torch.allclose(inner, torch.full((4,), 0.9))


# ---- is_eager ---------------------------------------------------------------------------------------------------


class SeesFunctions(TorchFunctionMode):
    seen: list[str]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.__dict__.setdefault("seen", []).append(str(func))
        return func(*args, **(kwargs or {}))


class SeesDispatch(TorchDispatchMode):
    seen: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.__dict__.setdefault("seen", []).append(str(func))
        return func(*args, **(kwargs or {}))


def traced() -> list[bool]:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(registry.is_eager())
        return x + 1

    torch.jit.trace(f, (torch.ones(1),), check_trace=False)
    return seen


def in_vmap() -> list[bool]:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(registry.is_eager())
        return x

    torch.func.vmap(f)(torch.ones(2))
    return seen


def in_mode(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[bool]:
    with mode():
        return [registry.is_eager()]


def compiling() -> list[bool]:
    seen = torch.compile(lambda x: x + int(torch.compiler.is_compiling()), backend="eager")(torch.zeros(()))
    return [not bool(seen)]  # is_eager's first condition, as dynamo sees it


NOT_EAGER: dict[str, Callable[[], list[bool]]] = {
    "compile": compiling,
    "FakeTensorMode": lambda: in_mode(FakeTensorMode),
    "TorchDispatchMode": lambda: in_mode(SeesDispatch),
    "TorchFunctionMode": lambda: in_mode(SeesFunctions),
    "vmap": in_vmap,
    "jit.trace": traced,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", NOT_EAGER)
def test_is_eager_says_no(what: str) -> None:
    """Fault: the fast path is taken where somebody traces, transforms or intercepts."""
    assert registry.is_eager()
    assert NOT_EAGER[what]() == [False]
    assert registry.is_eager()


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_a_mode_sees_the_optimizer(cls: Any) -> None:
    """Fault: the optimizer's fast path hides the update from a dispatch mode (FLOP counters, memory trackers)."""
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    p.grad, q.grad = torch.ones(4), torch.ones(4)
    plain, watched = cls([p], lr=0.1), cls([q], lr=0.1)
    for _ in range(2):
        plain.step()
        with SeesDispatch() as mode:
            watched.step()
        assert any("deepspeed.fused_adam_" in s or "deepspeed.cpu_adam_" in s for s in mode.seen)
    plain.step()
    watched.step()  # and back on the fast path
    assert_bits("p", p, q)
    assert int(watched.state[q]["step"]) == 3


# ---- autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["FusedAdam", "DeepSpeedCPUAdam", "adam_update", *ADAM_OPS])
def test_version_counters(way: str) -> None:
    """Fault: a parameter saved for backward is changed by a step and autograd does not notice: wrong gradients."""
    w = Parameter(torch.ones(4))
    x = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()  # saves w for x's gradient
    w.grad = torch.ones(4)
    m, v = torch.zeros(4), torch.zeros(4)
    before = w._version, m._version, v._version
    if way == "adam_update":
        create_adam(1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, False)
        adam_update(1, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, w.data, w.grad, m, v)
        assert m._version > before[1] and v._version > before[2]
        adam_update(1, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, w, w.grad, m, v)
        destroy_adam(1)
    elif way in OPS:
        rest = arguments(way)[5:]
        with torch.no_grad():
            op_named(way)([w], [w.grad], [m], [v], [torch.zeros((), dtype=torch.int64)], *rest)
        assert m._version > before[1] and v._version > before[2]
    else:
        {"FusedAdam": FusedAdam, "DeepSpeedCPUAdam": DeepSpeedCPUAdam}[way]([w]).step()
    assert w._version > before[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
