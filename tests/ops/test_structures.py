"""Structures that Python fills and kernels read: the compiler's layout, field by field; every target compiles."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from deepspeed_ops.op_builder.host import detect
from deepspeed_ops.op_builder.nvrtc import open_nvrtc
from deepspeed_ops.op_builder.settings import Settings
from deepspeed_ops.op_builder.spec import all_specs, get_spec
from deepspeed_ops.op_builder.toolchain import Nvrtc, discover_gpu

from deepspeed_ops import adam_step, lamb_step, launch, lion_step

ROOT = Path(__file__).resolve().parent.parent.parent
GPU_OPS = [name for name, spec in all_specs().items() if spec.device]


@pytest.fixture(scope="session")
def compilers() -> dict[tuple[int, int], Nvrtc]:
    """NVRTC of this machine by release; ``DS_TEST_NVRTC`` names a folder with one subfolder a release."""
    import os

    kept = os.environ.get("DS_TEST_NVRTC", "")
    folders = [str(p) for p in sorted(Path(kept).iterdir())] if kept else []
    settings = Settings.read()
    found: dict[tuple[int, int], Nvrtc] = {}
    for folder in [None, *folders]:
        tools = discover_gpu(settings, detect(settings.env), paths=[folder] if folder else None)
        found.update({n.version: n for n in tools.nvrtc})
    if not found:
        pytest.skip("no NVRTC (pip install nvidia-cuda-nvrtc, or DS_TEST_NVRTC=folder)")
    return found


def headers() -> dict[str, str]:
    csrc = ROOT / "csrc"
    return {p.relative_to(csrc).as_posix(): p.read_text(encoding="utf-8") for p in csrc.rglob("*.cuh")}


def asserts(name: str, structure: Any) -> list[str]:
    """Static assertions that a C++ type is laid out as a ctypes structure; arrays and nested ones by their start."""
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size of {name}");']
    for field, *_ in structure._fields_:
        nested = name.startswith("AdamScalars") and field in ("step_size", "inv_sqrt_bias2", "decay")
        cpp = f"step.{field}" if nested else field
        offset = getattr(structure, field).offset
        lines.append(f'static_assert(__builtin_offsetof({name}, {cpp}) == {offset}, "{name}.{field}");')
    return lines


STRUCTURES: dict[str, list[tuple[str, Any]]] = {
    "fused_adam": [
        ("Table<4>", launch.table_type(4)),
        ("Table<1>", launch.table_type(1)),
        ("PrepareArgs", launch.Prepare),
        ("Control", launch.Control),
        ("AdamScalars<float>", adam_step.device_scalars(False)),
        ("AdamScalars<double>", adam_step.device_scalars(True)),
    ],
    "fused_lion": [
        ("Table<3>", launch.table_type(3)),
        ("LionScalars<float>", lion_step.device_scalars(False)),
        ("LionScalars<double>", lion_step.device_scalars(True)),
    ],
    "fused_lamb": [
        ("Table<5>", launch.table_type(5)),
        ("LambScalars<float>", lamb_step.device_scalars(False)),
        ("LambScalars<double>", lamb_step.device_scalars(True)),
        ("LambRatios<float>", lamb_step.device_ratios(False)),
        ("LambRatios<double>", lamb_step.device_ratios(True)),
    ],
    "clip_grad_norm": [("Table<1>", launch.table_type(1))],
}


def compiled(op: str, nvrtc: Nvrtc, option: str, more: str = "") -> bytes:
    spec = get_spec(op)
    source = "\n".join((ROOT / "csrc" / s).read_text(encoding="utf-8") for s in spec.device) + "\n" + more
    flags = ["--std=c++17", "--fmad=false", option]
    return open_nvrtc(nvrtc).compile(source, f"{op}.cu", headers(), flags)[0]


@pytest.mark.parametrize("op", STRUCTURES)
def test_structures_agree_with_the_compiler(op: str, compilers: dict[tuple[int, int], Nvrtc]) -> None:
    """Fault: a field added on one side; kernels then read one parameter as another."""
    lines = [line for name, structure in STRUCTURES[op] for line in asserts(name, structure)]
    newest = compilers[max(compilers)]
    compiled(op, newest, "-arch=sm_90", "\n".join(lines))
    broken = lines[0].replace(" == ", " == 8 + ")
    with pytest.raises(Exception, match=r"static assertion|size of"):
        compiled(op, newest, "-arch=sm_90", broken)


def test_blocks_and_segments_agree() -> None:
    """Fault: a constant that lives in two languages and changes in one."""
    common = ROOT / "csrc" / "common"
    assert f"kBlock = {launch.BLOCK};" in (common / "multi_tensor.cuh").read_text(encoding="utf-8")
    reduce = (common / "reduce.cuh").read_text(encoding="utf-8")
    assert f"kReduceBlock = {lamb_step.REDUCE_BLOCK};" in reduce
