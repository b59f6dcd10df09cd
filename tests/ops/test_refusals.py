"""What is refused: with a typed error that says what, why and the fix, and with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_ops.op_builder.errors import DtypeError, OpsError, TensorError, UsageError
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_ops.cpu_adam import adam_update, cpu_adam_, create_adam, destroy_adam
from deepspeed_ops.fused_adam import fused_adam_, multi_tensor_adam, multi_tensor_check_finite

both = pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])


def ready(device: torch.device | str = "cpu", n: int = 4) -> Parameter:
    p = Parameter(torch.ones(n, device=device))
    p.grad = torch.ones(n, device=device)
    return p


# ---- scalars ----------------------------------------------------------------------------------------------------

SCALARS: list[tuple[dict[str, Any], type[OpsError], str]] = [
    ({"lr": "1e-3"}, DtypeError, r"lr is '1e-3'"),
    ({"lr": -1e-3}, UsageError, r"lr is -0\.001"),
    ({"lr": float("nan")}, UsageError, "lr is nan"),
    ({"lr": float("inf")}, UsageError, "lr is inf"),
    ({"eps": -1e-8}, UsageError, "eps is -1e-08"),
    ({"eps": "tiny"}, DtypeError, "eps is 'tiny'"),
    ({"weight_decay": -0.1}, UsageError, r"weight_decay is -0\.1"),
    ({"betas": (1.0, 0.999)}, UsageError, r"beta1 is 1\.0"),
    ({"betas": (0.9, 1.0)}, UsageError, r"beta2 is 1\.0"),
    ({"betas": (-0.1, 0.999)}, UsageError, r"beta1 is -0\.1"),
    ({"betas": (0.9,)}, UsageError, r"betas is \(0\.9,\)"),
    ({"betas": 0.9}, UsageError, "betas is 0.9"),
    ({"amsgrad": True}, UsageError, "amsgrad"),
]


@both
@pytest.mark.parametrize(("arguments", "error", "text"), SCALARS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_scalars_at_construction(cls: Any, arguments: dict[str, Any], error: type[OpsError], text: str) -> None:
    """Fault: a typo in a configuration trains for a day and diverges."""
    with pytest.raises(error, match=text) as caught:
        cls([ready()], **arguments)
    assert caught.value.what and caught.value.why


@both
@pytest.mark.parametrize(("arguments", "error", "text"), [s for s in SCALARS if "amsgrad" not in s[0]], ids=str)
def test_scalars_changed_later(cls: Any, arguments: dict[str, Any], error: type[OpsError], text: str) -> None:
    """Fault: only the constructor checks, and a scheduler sets what it likes."""
    p = ready()
    optimizer = cls([p])
    optimizer.param_groups[0].update(arguments)
    with pytest.raises(error, match=text):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(4))
    optimizer.param_groups[0].update(lr=0.1, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.0)
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(4))


@both
def test_errors_are_builtin_errors_too(cls: Any) -> None:
    """Fault: code that catches ValueError or TypeError, as torch's own optimizers raise, stops working."""
    with pytest.raises(TypeError):
        cls([ready()], lr="0.1")
    with pytest.raises(ValueError, match="lr"):
        cls([ready()], lr=-1.0)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_old_arguments_of_step(name: str) -> None:
    """Fault: apex's arguments are taken and ignored: the caller's gradients are not the ones applied."""
    p = ready()
    with pytest.raises(UsageError, match=name):
        FusedAdam([p]).step(**{name: [torch.ones(4)]})
    assert torch.equal(p.detach(), torch.ones(4))
    FusedAdam([p]).step(**{name: None})


# ---- tensors ----------------------------------------------------------------------------------------------------


def strided_parameter(device: torch.device) -> Parameter:
    return Parameter(torch.ones(4, 6, device=device)[:, ::2])


def transposed_parameter(device: torch.device) -> Parameter:
    return Parameter(torch.ones(4, 3, device=device).t())


def expanded_parameter(device: torch.device) -> Parameter:
    return Parameter(torch.ones((), device=device).expand(4, 3))


@pytest.mark.parametrize("make", [strided_parameter, transposed_parameter, expanded_parameter])
def test_strided_or_overlapping_parameter(make: Callable[[torch.device], Parameter], device: torch.device) -> None:
    """Fault: a copy is updated and thrown away (DeepSpeed's CPU Adam returns 0 and changes nothing)."""
    good, bad = ready(device), make(device)
    bad.grad = torch.ones_like(bad)
    before = bad.detach().clone()
    with pytest.raises(TensorError, match=r"p\[1\] of shape \(., .\) has strides"):
        FusedAdam([good, bad]).step()
    assert torch.equal(bad.detach(), before)
    assert bool((good == 1).all()), "checked before anything is launched"


@both
def test_sparse_gradient(cls: Any) -> None:
    """Fault: values of a sparse gradient read as a dense one. First step, and a step whose plan exists already."""
    p, q = ready(), ready()
    optimizer = cls([p, q])
    for _ in range(2):
        q.grad = None
        q.grad = torch.ones(4).to_sparse()
        before = p.detach().clone()
        with pytest.raises(TensorError, match="sparse"):
            optimizer.step()
        assert torch.equal(p.detach(), before)
        q.grad = None
        q.grad = torch.ones(4)
        optimizer.step()


def test_sparse_gradient_among_thousands() -> None:
    """Fault: metadata read by helper threads that wait for the GIL when torch raises: the step never returns."""
    params = [ready(n=2) for _ in range(2000)]
    optimizer = FusedAdam(params)
    optimizer.step()
    params[1990].grad = None
    params[1990].grad = torch.ones(2).to_sparse()
    with pytest.raises(TensorError, match="gradient 1990 is sparse"):
        optimizer.step()


def test_bad_gradient_in_a_later_bucket_changes_nothing() -> None:
    """Fault: half of the parameters are stepped when the error arrives, and the caller steps them again."""
    a, b = ready(), Parameter(torch.ones(4, dtype=torch.bfloat16))
    b.grad = torch.ones(4, dtype=torch.bfloat16)
    optimizer = FusedAdam([{"params": [a]}, {"params": [b]}], lr=0.1)
    optimizer.step()
    before = a.detach().clone()
    b.grad = None
    b.grad = torch.ones(4, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(TensorError):
        optimizer.step()
    assert torch.equal(a.detach(), before) and int(optimizer.state[a]["step"]) == 1


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_parameter_dtype_without_a_kernel(cls: Any, dtype: torch.dtype) -> None:
    """Fault: bytes of an unknown dtype read as floats."""
    p = Parameter(torch.ones(4).to(dtype), requires_grad=False)
    p.grad = torch.ones(4).to(dtype)
    with pytest.raises(DtypeError, match=str(dtype).removeprefix("torch.")):
        cls([p]).step()


@both
def test_float64_on_the_cpu(cls: Any) -> None:
    """Fault: float64 parameters updated with float32 accuracy."""
    p = Parameter(torch.ones(4, dtype=torch.float64))
    p.grad = torch.ones(4, dtype=torch.float64)
    with pytest.raises(DtypeError, match="float64"):
        cls([p]).step()
    assert torch.equal(p.detach(), torch.ones(4, dtype=torch.float64))


@both
def test_meta_parameter(cls: Any) -> None:
    """Fault: address 0 of a tensor without memory."""
    p = Parameter(torch.ones(4, device="meta"))
    p.grad = torch.ones(4, device="meta")
    with pytest.raises((UsageError, TensorError), match="meta"):
        cls([p]).step()


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own."""


@both
def test_subclass_parameter_or_gradient(cls: Any) -> None:
    """Fault: memory of a wrapper used by address. Right result, or an error naming the class; never another one."""
    for which in ("parameter", "gradient"):
        p = Parameter(torch.ones(4).as_subclass(Tagged)) if which == "parameter" else Parameter(torch.ones(4))
        p.grad = torch.ones(4).as_subclass(Tagged)
        try:
            cls([p], lr=0.1).step()
        except TensorError as refusal:
            assert "Tagged" in str(refusal) or "Parameter" in str(refusal)
            assert bool((p.detach().as_subclass(torch.Tensor) == 1).all())
        else:
            assert bool(((p.detach().as_subclass(torch.Tensor) - 0.9).abs() < 1e-6).all())


# ---- the functions under DeepSpeed's names ----------------------------------------------------------------------


def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int = 1, optimizer_id: int = 3) -> None:
    create_adam(3, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    try:
        adam_update(optimizer_id, step, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, p, g, m, v)
    finally:
        destroy_adam(3)


def four(n: int = 4) -> list[Tensor]:
    return [torch.ones(n) for _ in range(4)]


def test_adam_update_refuses() -> None:
    """Fault: any of these as a crash, a silent return or a wrong update."""
    p, g, m, v = four()
    for bad, error, text in (
        ((p[::2], g[::2].clone(), m[::2].clone(), v[::2].clone()), TensorError, "strides"),
        ((p, torch.ones(5), m, v), TensorError, r"shape \(5,\)"),
        ((p, g, torch.ones(5), v), TensorError, r"exp_avg has shape \(5,\)"),
        ((p, g, m, torch.ones(2, 2)), TensorError, r"exp_avg_sq has shape \(2, 2\)"),
        ((p, g, m, v.half()), DtypeError, "exp_avg is torch.float32 and exp_avg_sq torch.float16"),
        ((p.double(), g, m, v), DtypeError, "float64"),
        ((p, g.to_sparse(), m, v), (TensorError, DtypeError), "sparse"),
        ((p, g.to("meta"), m, v), TensorError, "meta"),
        ((p, g.int(), m, v), DtypeError, "int32"),
    ):
        with pytest.raises(error, match=text):
            update(*bad)
    with pytest.raises(UsageError, match="step is 0"):
        update(p, g, m, v, step=0)
    with pytest.raises(UsageError, match="optimizer id 99 is unknown"):
        update(p, g, m, v, optimizer_id=99)
    assert all(torch.equal(x, torch.ones(4)) for x in (p, g, m, v))


OVERLAPS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "m is p": lambda room: (room[:8], room[30:38], room[:8], room[16:24]),
    "v is m": lambda room: (room[:8], room[30:38], room[8:16], room[8:16]),
    "p and m overlap": lambda room: (room[:8], room[30:38], room[7:15], room[16:24]),
    "v begins inside p": lambda room: (room[:8], room[30:38], room[8:16], room[3:11]),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlapping_memory(kind: str) -> None:
    """Fault: two roles of one element: what is written depends on the vector width and the number of threads."""
    room = torch.ones(40)
    p, g, m, v = OVERLAPS[kind](room)
    with pytest.raises(TensorError, match="overlap"):
        update(p, g, m, v)
    steps = [torch.zeros((), dtype=torch.int64)]
    with pytest.raises(TensorError, match="overlap"):
        cpu_adam_([p], [g], [m], [v], steps, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, True)
    assert torch.equal(room, torch.ones(40))


def test_two_parameters_of_one_memory(device: torch.device) -> None:
    """Fault: two threads or blocks update one element."""
    room = torch.ones(12, device=device)
    a, b = Parameter(room[:8]), Parameter(room[4:12])
    a.grad, b.grad = torch.ones(8, device=device), torch.ones(8, device=device)
    with pytest.raises(TensorError, match="overlap"):
        FusedAdam([a, b]).step()
    assert bool((room == 1).all())


def test_neighbours_do_not_overlap(device: torch.device) -> None:
    """Fault: views of one flat buffer, as FSDP makes them, refused; they only touch. Empty ones lie anywhere."""
    room, gradients = torch.ones(12, device=device), torch.ones(12, device=device)
    params = [Parameter(room[:5]), Parameter(room[5:5]), Parameter(room[5:12])]
    for p, g in zip(params, (gradients[:5], gradients[2:2], gradients[5:]), strict=True):
        p.grad = g
    FusedAdam(params, lr=0.1).step()
    assert bool(((room - 0.9).abs() < 1e-6).all())


def functional(op: Any, lists: list[list[Tensor]], steps: list[Tensor]) -> None:
    if op is cpu_adam_:
        op(*lists, steps, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, True)
    else:
        op(*lists, steps, None, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, True, None, None, None)


@pytest.mark.parametrize("op", [cpu_adam_, fused_adam_], ids=["cpu_adam_", "fused_adam_"])
def test_functional_ops_refuse(op: Any) -> None:
    """Fault: lists of unlike lengths, or counters that are not counters, read past their end."""
    lists = [[x] for x in four()]
    with pytest.raises(TensorError, match="tensors"):
        functional(op, lists, [])
    with pytest.raises(TensorError, match="steps"):
        functional(op, lists, [torch.zeros(())])
    with pytest.raises(TensorError, match="steps"):
        functional(op, lists, [torch.zeros(2, dtype=torch.int64)])
    assert all(torch.equal(x[0], torch.ones(4)) for x in lists)


def test_multi_tensor_adam_refuses() -> None:
    """Fault: a mode or a step that the kernel takes for another."""
    flag, (p, g, m, v) = torch.zeros(1, dtype=torch.int32), four()
    for mode, step, lists, error in (
        (2, 1, [[g], [p], [m], [v]], UsageError),
        (1, 0, [[g], [p], [m], [v]], UsageError),
        (1, 1, [[g], [p], [m]], TensorError),
        (1, 1, [[g], [p], [m], []], TensorError),
    ):
        with pytest.raises(error):
            multi_tensor_adam(2048, flag, lists, 1e-3, 0.9, 0.999, 1e-8, step, mode, 1, 0.0)
    with pytest.raises(TensorError, match="noop_flag"):
        multi_tensor_check_finite(torch.zeros(1), [g])
    assert all(torch.equal(x, torch.ones(4)) for x in (p, g, m, v))
