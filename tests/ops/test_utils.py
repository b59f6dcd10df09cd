"""utils: flatten, unflatten, cast_to_byte_tensor; an op with nothing to compile, installed wherever Python is."""

from __future__ import annotations

import gc

import pytest
import torch
from deepspeed_ops.op_builder.aot import build_ahead
from deepspeed_ops.op_builder.builders import ALL_OPS, UtilsBuilder
from deepspeed_ops.op_builder.errors import DtypeError, LoadFailed, TensorError
from deepspeed_ops.op_builder.settings import Settings

from deepspeed_ops.flatten import cast_to_byte_tensor, flatten, unflatten


def test_there_and_back(device: torch.device, rng: torch.Generator) -> None:
    """Fault: an element lost, or strided tensors flattened in the order of memory."""
    tensors = [torch.randn(s, generator=rng).to(device) for s in ((2, 3), (), (0,), (5,))]
    tensors.append(torch.randn(4, 3, generator=rng).to(device).t())
    flat = flatten(tensors)
    assert flat.shape == (24,)
    back = unflatten(flat, tensors)
    assert all(torch.equal(x, y) for x, y in zip(back, tensors, strict=True))
    back[0].fill_(7.0)
    assert bool((flat[:6] == 7.0).all()), "views of the flat tensor"
    assert unflatten(torch.zeros(0), []) == ()


def test_flatten_is_the_op() -> None:
    """Fault: the registered op and the function drift apart."""
    tensors = [torch.arange(3.0), torch.ones(2, 2)]
    assert torch.equal(torch.ops.deepspeed.flatten(tensors), flatten(tensors))
    torch.library.opcheck(torch.ops.deepspeed.flatten.default, (tensors,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_bytes_share_and_keep_memory(dtype: torch.dtype, device: torch.device) -> None:
    """Fault: a view that does not keep its source alive (DeepSpeed's from_blob), then reads freed memory."""
    source = torch.ones(3, 4, device=device).to(dtype)
    view = cast_to_byte_tensor(source)
    assert view.dtype is torch.uint8 and view.shape == (12 * source.element_size(),)
    assert view.data_ptr() == source.data_ptr()
    before = view.clone()
    del source
    gc.collect()
    torch.full((12,), 3, device=device)
    assert torch.equal(view, before)
    several = cast_to_byte_tensor([torch.zeros(2), torch.zeros(3)])
    assert [x.numel() for x in several] == [8, 12]


def test_refusals() -> None:
    """Fault: bytes of a copy, which nobody owns; tensors of two dtypes in one."""
    with pytest.raises(TensorError, match="strides"):
        cast_to_byte_tensor(torch.zeros(4, 4).t())
    with pytest.raises(TensorError, match="layout"):
        cast_to_byte_tensor(torch.eye(2).to_sparse())
    with pytest.raises(DtypeError):
        flatten([torch.zeros(2), torch.zeros(2, dtype=torch.int32)])
    with pytest.raises(TensorError, match="no tensor"):
        flatten([])
    with pytest.raises(TensorError, match="5 elements"):
        unflatten(torch.zeros(4), [torch.zeros(5)])


def test_python_only_op_is_installed(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an op without sources reported as missing, or failing to load for want of a compiler."""
    from deepspeed_ops.op_builder.host import HostFacts
    from deepspeed_ops.op_builder.spec import get_spec

    from deepspeed_ops import git_version_info, ops_report

    monkeypatch.setenv("DS_JIT", "0")
    monkeypatch.setenv("PATH", "")
    builder = UtilsBuilder()
    assert builder.is_compatible() and builder.load().flatten is flatten
    assert ALL_OPS["utils"].absolute_name() == "deepspeed.ops.utils_op"
    assert builder.sources() == [] and builder.BUILD_VAR == "DS_BUILD_UTILS"
    assert git_version_info.installed_ops["utils"] is True
    seen = ops_report.Seen(HostFacts("linux", "x86_64", "glibc", (2, 36)), None)
    line = ops_report._line(None, get_spec("utils"), seen)  # type: ignore[arg-type]
    assert line.installed and line.compatible and "nothing to compile" in line.note
    from deepspeed_ops.op_builder import loader

    with pytest.raises(LoadFailed, match="no host library"):
        loader.host_module("utils")


@pytest.mark.parametrize("value", ["1", "0"])
def test_build_variable(value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fault: DS_BUILD_UTILS=1 fails because nothing was built; 0 is unknown."""
    out = tmp_path_factory.mktemp("parts")
    report = build_ahead(out, Settings.read({"DS_BUILD_UTILS": value}), fetch=False)
    assert not report.built
    text = "\n".join(report.lines())
    assert ("utils is Python only: nothing to compile" in text) is (value == "1")
    assert ("DS_BUILD_UTILS=0" in text) is (value == "0")


def test_face_modules() -> None:
    """Fault: DeepSpeed's module path of the op leads nowhere."""
    from deepspeed.ops import op_builder, utils_op

    assert utils_op.flatten is flatten and op_builder.UtilsBuilder is UtilsBuilder
    assert "cast_to_byte_tensor" in dir(utils_op)
