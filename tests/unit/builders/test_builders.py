"""Guards against builders that promise what the loader cannot keep, or lose a name that users' code relies on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import op_builder
from op_builder import builders, host, toolchain
from op_builder.builders import ALL_BUILDERS, ALL_OPS, CUDAOpBuilder, OpBuilder, TorchCPUOpBuilder
from op_builder.errors import ArchListError, LoadFailed, OpsError
from op_builder.gpus import Device, Driver
from op_builder.host import HostFacts
from op_builder.process import platform_facts
from op_builder.settings import Settings
from op_builder.sources import ffi_abi, source_digest
from op_builder.spec import all_specs
from op_builder.store import Store
from tests.toys import device_manifest, host_manifest, put, toy_home, toy_spec

H100 = Device(0, "GPU-1", "toy GPU", (9, 0), 1 << 30)
OLD = Device(1, "GPU-2", "old GPU", (6, 1), 1 << 30)


def builder_for(tmp_path: Path, env: dict[str, str] | None = None, **spec: Any) -> OpBuilder:
    """A builder of a toy op in a home of its own, with an environment that has no compiler."""
    home = tmp_path / "home"
    if not home.exists():
        toy_home(home)
    made = builders._make(toy_spec(**spec))
    settings = Settings.read({"PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "jit"), **(env or {})})
    return made(home=home, settings=settings)


def put_host(tmp_path: Path) -> None:
    import tvm_ffi

    abi = ffi_abi(tvm_ffi.__version__)
    facts = platform_facts()
    digest = source_digest(toy_spec(), "host", tmp_path / "home/csrc", abi)
    manifest = host_manifest(source_digest=digest, abi=abi, platform=facts.platform, glibc=None, needed=())
    put(Store(tmp_path / "home/parts", "package"), manifest)


def test_every_spec_has_its_builder_under_deepspeeds_name() -> None:
    """Fault: a new op without a builder, or a builder whose table entries differ from the spec."""
    assert list(ALL_OPS) == list(all_specs())
    for name, spec in all_specs().items():
        cls = ALL_BUILDERS[spec.builder]
        assert getattr(builders, spec.builder) is cls is getattr(op_builder, spec.builder)
        builder = ALL_OPS[name]
        assert type(builder) is cls
        assert (builder.NAME, builder.BUILD_VAR, builder.name) == (name, spec.env_var, name)
        assert builder.absolute_name() == spec.absolute_name
        assert issubclass(cls, OpBuilder) and issubclass(cls, CUDAOpBuilder) is not spec.python_only
        assert issubclass(cls, TorchCPUOpBuilder) is (bool(spec.host) and not spec.device)
        assert all((builders.HOME / source).is_file() for source in builder.sources())
        assert (builders.HOME / builder.include_paths()[0]).is_dir()


def test_names_of_the_package() -> None:
    """Fault: ``from op_builder import CPUAdamBuilder`` fails, or an unknown name gives anything but AttributeError."""
    assert op_builder.CPUAdamBuilder is builders.ALL_BUILDERS["CPUAdamBuilder"]
    assert {"ALL_OPS", "CPUAdamBuilder", "OpBuilder"} <= set(dir(op_builder))
    with pytest.raises(AttributeError):
        op_builder.NoSuchBuilder  # noqa: B018
    assert builders.builder_closure("CPUAdamBuilder") is op_builder.CPUAdamBuilder
    with pytest.raises(AttributeError, match="CPUAdamBuilder"):
        builders.builder_closure("NoSuchBuilder")


def test_flags_are_those_of_the_plan_and_bind_to_nothing() -> None:
    """Fault: the facade reports flags that no build uses."""
    builder = ALL_OPS["cpu_adam"]
    assert "-ltvm_ffi" in builder.extra_ldflags()
    assert not [f for f in (*builder.cxx_args(), *builder.nvcc_args()) if "march" in f or "fast" in f]
    assert builder.nvcc_args() == [] and "--std=c++17" in ALL_OPS["fused_adam"].nvcc_args()


def test_compatible_is_what_the_loader_can_do(tmp_path: Path) -> None:
    """Fault (false green): "compatible" on a machine that has neither part nor compiler; a reason that is lost."""
    builder = builder_for(tmp_path)
    assert not builder.is_compatible()
    assert builder.error_log and "no part fits" in builder.error_log and "no C++ compiler" in builder.error_log
    put_host(tmp_path)
    builder = builder_for(tmp_path)
    assert builder.is_compatible() and builder.builder_available() and builder.error_log is None


def test_a_gpu_op_needs_one_gpu_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a GPU op "compatible" without a GPU; or blocked by a GPU nobody uses."""
    builder = builder_for(tmp_path, device=["toy/toy.cu"])
    put_host(tmp_path)
    facts = platform_facts()
    monkeypatch.setattr(toolchain, "discover_gpu", lambda settings, host: toolchain.Toolchain())

    def see(*devices: Device) -> None:
        seen = HostFacts(facts.system, facts.machine, facts.libc, facts.libc_version,
                         driver=Driver("580.1", (13, 0)), devices=devices, notes=("no NVML",))  # fmt: skip
        monkeypatch.setattr(host, "detect", lambda env: seen)

    see()
    assert not builder.is_compatible() and "none is visible: no NVML" in str(builder.error_log)
    see(OLD, H100)
    assert not builder.is_compatible() and "GPU 1 old GPU" in str(builder.error_log)
    digest = source_digest(toy_spec(device=["toy/toy.cu"]), "device", tmp_path / "home/csrc", "")
    put(Store(tmp_path / "home/parts", "package"), device_manifest("sm90", source_digest=digest))
    assert builder.is_compatible()
    see(OLD)
    assert not builder.is_compatible()


def test_a_bad_setting_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a report that dies because of one misspelt variable."""
    monkeypatch.setenv("DS_BUILD_CPU_ADAN", "1")
    builder = type(ALL_OPS["cpu_adam"])()
    assert not builder.is_compatible(verbose=True)
    assert "DS_BUILD_CPU_ADAM" in str(builder.error_log)


def test_load_gives_the_faces_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fault: load() returns something else than the functions DeepSpeed's callers expect."""
    monkeypatch.setattr(json, "module", lambda: "the functions", raising=False)
    builder = builder_for(tmp_path)
    assert builder.load() == builder.load(verbose=False) == builder.jit_load() == "the functions"
    with pytest.raises(LoadFailed, match="no_such_face"):
        builder_for(tmp_path, face="no_such_face").load()


def test_arch_args_follow_the_list_in_numeric_order_and_write_nothing(tmp_path: Path) -> None:
    """Fault (arch-list leak): one builder narrows the list of every later one; "9.0a" crashes the parser."""
    before = dict(os.environ)
    builder = builder_for(tmp_path, {"TORCH_CUDA_ARCH_LIST": "9.0a;6.1+PTX 8.6"}, device=["toy/toy.cu"], min_sm=[7, 0])
    assert isinstance(builder, CUDAOpBuilder)
    assert builder.compute_capability_args() == [
        "-gencode=arch=compute_86,code=sm_86", "-gencode=arch=compute_90a,code=sm_90a",
    ]  # fmt: skip
    assert builder.compute_capability_args("8.0") == ["-gencode=arch=compute_80,code=sm_80"]
    with pytest.raises(ArchListError):
        builder.compute_capability_args("80")
    assert dict(os.environ) == before


def test_defaults_and_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fault: a default that the compiler refuses; a missing nvcc as FileNotFoundError."""
    assert "9.0" in builders.get_default_compute_capabilities().split(";")
    assert builders.assert_no_cuda_mismatch("toy") is True
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    script.chmod(0o755)
    assert issubclass(builders.MissingCUDAException, OpsError) and issubclass(builders.CUDAMismatchException, OpsError)
    if sys.platform == "linux":
        monkeypatch.setattr(toolchain, "discover_gpu", lambda settings, facts: toolchain.Toolchain())
        with pytest.raises(builders.MissingCUDAException, match="toy"):
            builders.installed_cuda_version("toy")


def test_small_things_users_call(tmp_path: Path) -> None:
    """Fault: AttributeError in code written for DeepSpeed's base class."""
    builder = builder_for(tmp_path, {"PATH": os.environ["PATH"]})
    assert builder.strip_empty_entries(["-a", "", "-b"]) == ["-a", "-b"]
    assert builder.command_exists("no-such-program | ls") and not builder.command_exists("no-such-program")
    assert not OpBuilder.is_rocm_pytorch()
    assert not builder.has_function("no_such_function_anywhere", ["m"])
    assert builder.error_log
    builder.warning("a reason")
    assert builder.error_log == "a reason"
