"""Guards against settings that are misread, silently ignored, or written back to the environment."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from op_builder.errors import SettingError
from op_builder.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    """Fault: a default that differs from what the documentation says."""
    got = Settings.read({})
    assert got == Settings(env={})
    assert got.jit and got.build_ops is None and not got.build_op


def test_every_variable_reaches_its_field() -> None:
    """Fault: a variable that is documented and read by nobody."""
    env = {
        "DS_OPS_PATH": os.pathsep.join(["/a b", "", "/c"]),
        "DS_JIT": "0",
        "TORCH_CUDA_ARCH_LIST": " 8.0 ; 9.0 ",
        "TORCH_EXTENSIONS_DIR": "/x y",
        "MAX_JOBS": "3",
        "CUDA_PATH": "/cu",
        "CC": "gcc-12",
        "CXX": "ccache g++",
        "CFLAGS": "-g -DX='a b'",
        "CXXFLAGS": "-O1",
        "CPPFLAGS": "-I'/inc dir'",
        "LDFLAGS": "-L/l",
        "DS_BUILD_OPS": "1",
        "DS_BUILD_CPU_ADAM": "0",
        "DS_BUILD_STRING": " ",
        "DS_SKIP_CUDA_CHECK": "1",
    }
    got = Settings.read(env)
    assert got.ops_path == (Path("/a b"), Path("/c"))
    assert not got.jit
    assert got.arch_list == "8.0 ; 9.0"
    assert got.extensions_dir == Path("/x y")
    assert (got.max_jobs, got.cuda_home, got.cc, got.cxx) == (3, "/cu", "gcc-12", "ccache g++")
    assert got.cflags == ("-g", "-DX=a b")
    assert got.user_flags == ("-I/inc dir", "-g", "-DX=a b", "-O1", "-L/l")
    assert got.build_ops is True and dict(got.build_op) == {"cpu_adam": False}
    assert got.build_string == " " and got.skip_cuda_check


@pytest.mark.parametrize("name", ["DS_BUILD_OPS", "DS_BUILD_FUSED_ADAM", "DS_JIT"])
def test_an_empty_switch_is_unset(name: str) -> None:
    """Fault: ``VAR=`` counted as a value."""
    assert Settings.read({name: ""}) == Settings(env={name: ""})


@pytest.mark.parametrize("name", ["DS_BUILD_OPS", "DS_BUILD_FUSED_ADAM", "DS_JIT"])
@pytest.mark.parametrize("value", ["yes", "2", "True", "-1"])
def test_a_switch_takes_0_or_1_only(name: str, value: str) -> None:
    """Fault: a value that means one thing to the user and another to the code."""
    with pytest.raises(SettingError) as err:
        Settings.read({name: value})
    assert name in str(err.value) and repr(value) in str(err.value)


def test_an_unknown_op_variable_is_refused_with_the_nearest_spelling() -> None:
    """Fault (asked-for op silently absent): a misspelt variable that does nothing."""
    with pytest.raises(SettingError) as err:
        Settings.read({"DS_BUILD_CPU_ADAN": "1"})
    assert "DS_BUILD_CPU_ADAN" in err.value.what and err.value.fix == "DS_BUILD_CPU_ADAM=1"
    with pytest.raises(SettingError) as err:
        Settings.read({"DS_BUILD_ZZZZZZZZ": "1"})
    assert "DS_BUILD_OPS" in err.value.fix


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_path_list_is_no_toolkit(name: str) -> None:
    """Fault (toolkit found by PATH only): a list read as one folder, failing far from its cause."""
    value = os.pathsep + "/usr/local/cuda"
    with pytest.raises(SettingError) as err:
        Settings.read({name: value})
    assert repr(value) in str(err.value) and err.value.fix == f"{name}=/usr/local/cuda"


def test_a_folder_with_the_list_separator_in_its_name_is_one_folder() -> None:
    """Fault (quoting): a legal folder name refused as a list."""
    value = f"/opt/cuda{os.pathsep}13"
    assert Settings.read({"CUDA_HOME": value}, isdir=lambda p: p == value).cuda_home == value


def test_cuda_home_wins_over_cuda_path() -> None:
    """Fault: two rooms that prefer different variables."""
    assert Settings.read({"CUDA_HOME": "/a", "CUDA_PATH": "/b"}).cuda_home == "/a"


@pytest.mark.parametrize("value", ["0", "-2", "many", "1.5"])
def test_max_jobs_is_a_positive_number(value: str) -> None:
    """Fault: a job count that means no job at all."""
    with pytest.raises(SettingError, match="MAX_JOBS"):
        Settings.read({"MAX_JOBS": value})


def test_an_open_quote_is_named() -> None:
    """Fault: a bare ValueError of shlex without the variable's name."""
    with pytest.raises(SettingError, match="CXXFLAGS"):
        Settings.read({"CXXFLAGS": "-DX='a"})


def test_settings_are_frozen_and_the_environment_is_untouched() -> None:
    """Fault: a room that leaks its decision to the next one through the environment."""
    before = dict(os.environ)
    got = Settings.read()
    with pytest.raises(FrozenInstanceError):
        got.jit = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        got.env["X"] = "1"  # type: ignore[index]
    assert dict(os.environ) == before
