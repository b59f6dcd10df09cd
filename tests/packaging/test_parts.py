"""Wheels with parts: what asks for them, what they are called, and that strangers' machines run them uncompiled."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from builds import Venv, build, clean_env, copy_checkout, install, make_venv, names, run

from op_builder.matrix import load

# Five steps of AdamW on 100,003 elements through the host library, with numpy and without torch. The numbers are exact
# in float32 on every machine, so the digests of two environments can be compared.
DRIVE = """
import hashlib, json, struct, sys
import numpy as np
from deepspeed_ops.op_builder import loader
module, n = loader.host_module("cpu_adam"), 100_003
i = np.arange(n, dtype=np.int64)
p = ((i * 7919 % 1021 - 510) / 512).astype(np.float32)
m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
for step in range(1, 6):
    g = ((i * 104729 % 2039 - 1019) / 1024 * step).astype(np.float32)
    table = np.array([a.ctypes.data for a in (p, g, m, v)] + [n], np.int64)
    steps = np.array([step], np.int64)
    args = np.frombuffer(struct.pack("=6q6d3q", table.ctypes.data, steps.ctypes.data, 1, 0, 0, 0,
        1e-2, 0.9, 0.999, 1e-8, 1e-2, 1.0, 1, 1, 2), np.uint8).copy()
    module["step_table"](args.ctypes.data, "")
digest = hashlib.sha256(p.tobytes() + m.tobytes() + v.tobytes()).hexdigest()
part = loader.Loader().resolution("cpu_adam").choice.part.path
print(json.dumps({"digest": digest, "part": str(part), "moved": bool((m != 0).any()), "torch": "torch" in sys.modules}))
"""

# The same steps through the optimizer class that users call.
DRIVE_TORCH = """
import hashlib, json, numpy as np, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
n = 100_003
i = np.arange(n, dtype=np.int64)
p = torch.nn.Parameter(torch.from_numpy(((i * 7919 % 1021 - 510) / 512).astype(np.float32)))
optimizer = DeepSpeedCPUAdam([p], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
for step in range(1, 6):
    p.grad = torch.from_numpy(((i * 104729 % 2039 - 1019) / 1024 * step).astype(np.float32))
    optimizer.step()
state = optimizer.state[p]
out = [t.detach().numpy().tobytes() for t in (p, state["exp_avg"], state["exp_avg_sq"])]
print(json.dumps({"digest": hashlib.sha256(b"".join(out)).hexdigest()}))
"""


def stranger(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a machine without any compiler, where nothing may be built."""
    empty, home = folder / "empty", folder / "home"
    empty.mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in clean_env().items() if k in ("LANG", "SYSTEMROOT", "TMPDIR", "TEMP")}
    store = {"TORCH_EXTENSIONS_DIR": str(folder / "store"), "DS_JIT": "0"}
    return {**kept, "PATH": str(empty), "HOME": str(home), **store, **more}


@cache
def other_python() -> str | None:
    """Another release of Python on this machine that we support, nearest releases first."""
    places = [Path(d) for d in os.environ.get("PATH", "").split(os.pathsep) if d]
    places += sorted(Path(sys.base_prefix).parent.glob("*/bin"))  # siblings, where a version manager keeps them
    for minor in (12, 13, 10, 14, 11):
        if minor != sys.version_info.minor:
            for place in places:
                candidate = place / f"python3.{minor}"
                if candidate.is_file() and works(candidate):
                    return str(candidate)
    return None


def works(python: Path) -> bool:
    """Whether it starts (a pyenv shim may not) and can make environments with pip."""
    done = subprocess.run(
        [str(python), "-c", "import venv, ensurepip, ssl"], stdin=subprocess.DEVNULL, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode == 0


def test_names_tell_what_is_inside(plain_wheel: Path, full_wheel: Path, tmp_path: Path) -> None:
    """Fault (DeepSpeed#6920, #1124): a wheel without ops and one with ops have one name, and a cache mixes them up."""
    assert plain_wheel.name.endswith("-py3-none-any.whl")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", full_wheel.name)
    version = plain_wheel.name.split("-")[1]
    assert full_wheel.name.split("-")[1] == version
    for wheel, pure in ((plain_wheel, "true"), (full_wheel, "false")):
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(f"deepspeed-{version}.dist-info/WHEEL").decode("ascii")
        assert f"Root-Is-Purelib: {pure}" in text and wheel.stem.split("-", 2)[2] in text
    assert [n for n in names(full_wheel) if "/parts/" not in n] == names(plain_wheel)
    both = tmp_path / "both"
    both.mkdir()
    for wheel in (plain_wheel, full_wheel):
        shutil.copy(wheel, both)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-index", "--find-links", both]
    run(*pip, "-d", tmp_path / "chosen", "deepspeed", cwd=tmp_path)
    assert [p.name for p in (tmp_path / "chosen").iterdir()] == [full_wheel.name]


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux tags exist on Linux only")
def test_the_tag_is_what_another_reader_finds(full_wheel: Path, tmp_path: Path) -> None:
    """Fault: our own ELF reader misses a version need, and the wheel is offered to systems that cannot load it."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed (apt-get install binutils)")
    with zipfile.ZipFile(full_wheel) as archive:
        archive.extractall(tmp_path)
    libraries = sorted(tmp_path.rglob("*.so"))
    assert libraries
    text = "".join(run(readelf, "-W", "--version-info", "--dynamic", lib, cwd=tmp_path).stdout for lib in libraries)
    floor = max(tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", text))
    tag = re.search(r"manylinux_(\d+)_(\d+)_", full_wheel.name)
    assert tag is not None and (int(tag[1]), int(tag[2])) >= floor
    assert not re.search(r"lib(torch|c10|python|cudart|cublas|cuda)\b", text), "the op depends on torch, Python or CUDA"
    assert "RUNPATH" not in text and "RPATH" not in text, "a path of the machine that built it"


def test_the_build_says_what_it_did(full: tuple[Path, str]) -> None:
    """Fault: an op is left out silently, or GPU code is made for other architectures than asked for."""
    wheel, output = full
    for number in ("75", "86"):
        assert f"-gencode=arch=compute_{number},code=sm_{number}" in output
        assert any(f"/fused_adam/sm{number}-" in n for n in names(wheel)), output
    assert not any("sm90" in n for n in names(wheel))
    with zipfile.ZipFile(wheel) as archive:
        report = json.loads(archive.read("deepspeed_ops/parts/build-report.json"))
        installed = archive.read("deepspeed/git_version_info_installed.py").decode("utf-8")
    assert {b["op"] for b in report["built"]} >= {"cpu_adam", "fused_adam"}
    for built in report["built"]:
        assert f"built    {built['op']} {built['variant']}" in output
    assert "'cpu_adam': True" in installed and "accelerator_name = 'cuda'" in installed


def test_the_next_wheel_is_empty_again(checkout: Path, full_wheel: Path, plain_wheel: Path, tmp_path: Path) -> None:
    """Fault: parts of the last build are left in the build folder and ship in a wheel nobody asked parts of."""
    again = build(checkout, tmp_path, "--wheel")[0][0]
    assert again.name == plain_wheel.name and names(again) == names(plain_wheel)


@pytest.fixture(scope="module")
def with_torch(full_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """This Python, this torch, and the wheel with parts."""
    venv = make_venv(tmp_path_factory.mktemp("torch") / "venv")
    install(venv, full_wheel)
    return venv


@pytest.fixture(scope="module")
def without_torch(full_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Another Python, no torch, and the same wheel."""
    python = other_python()
    if python is None:
        pytest.skip("no second Python (3.10 to 3.14 with venv and ensurepip) is installed")
    root = tmp_path_factory.mktemp("bare") / "venv"
    run(python, "-m", "venv", root, cwd=root.parent)
    venv = Venv(root / "bin" / "python", root)
    pip = [venv.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, "apache-tvm-ffi<0.2", "filelock", "ninja", "numpy", "packaging", "tomli", cwd=root)
    run(*pip, "--no-deps", full_wheel, cwd=root)
    return venv


def drive(venv: Venv, code: str, folder: Path) -> dict[str, object]:
    """Run code as a stranger would; nothing may have been built."""
    env = stranger(folder)
    answer: dict[str, object] = json.loads(run(venv.python, "-c", code, cwd=folder, env=env).stdout.splitlines()[-1])
    assert not list(Path(env["TORCH_EXTENSIONS_DIR"]).rglob("*.so")), "something was compiled"
    return answer


def test_one_wheel_two_pythons_equal_bits(with_torch: Venv, without_torch: Venv, tmp_path: Path) -> None:
    """Fault: a part that serves one Python, needs torch or a compiler, or gives other bits elsewhere."""
    here = drive(with_torch, DRIVE, tmp_path / "here")
    there = drive(without_torch, DRIVE, tmp_path / "there")
    assert here["moved"] and here["digest"] == there["digest"]
    assert str(with_torch.root) in str(here["part"]) and str(without_torch.root) in str(there["part"])
    assert there["torch"] is False


@pytest.mark.parametrize("release", ["minimum", "newest"])
def test_lowest_and_newest_ffi(release: str, full_wheel: Path, with_torch: Venv, tmp_path: Path) -> None:
    """Fault: a part built against one release of TVM-FFI does not load, or computes otherwise, under another."""
    matrix = load()
    wanted = f"=={matrix.ffi_minimum}" if release == "minimum" else f">={matrix.ffi_minimum},<{matrix.ffi_below}"
    site, python = tmp_path / "site", sys.executable
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target", site]
    run(*pip, f"{matrix.ffi_package}{wanted}", full_wheel, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\nimport tvm_ffi; assert {str(site)!r} in tvm_ffi.__file__\n"
    env = stranger(tmp_path)
    answer = json.loads(run(python, "-c", code + DRIVE, cwd=tmp_path, env=env).stdout.splitlines()[-1])
    assert answer["digest"] == drive(with_torch, DRIVE, tmp_path / "here")["digest"]


def test_an_arch_list_alone_builds_gpu_parts(tmp_path: Path) -> None:
    """Fault: `TORCH_CUDA_ARCH_LIST="6.1;8.6" pip install .` builds nothing, or cannot make what CUDA 13 dropped."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "out"]
    run(*pip, copy_checkout(tmp_path / "src"), cwd=tmp_path, env=clean_env(TORCH_CUDA_ARCH_LIST="6.1;8.6"))
    (wheel,) = (tmp_path / "out").glob("*.whl")
    parts = [n for n in names(wheel) if "/parts/" in n]
    assert any("/fused_adam/sm61-" in n for n in parts) and any("/fused_adam/sm86-" in n for n in parts), parts
    assert not any("/cpu_adam/" in n for n in parts)


def test_the_optimizer_class_runs_the_same_part(with_torch: Venv, tmp_path: Path) -> None:
    """Fault: the class users call takes another path (or other arguments) than the library that was proved."""
    pytest.importorskip("torch", reason="torch is not installed")
    assert drive(with_torch, DRIVE_TORCH, tmp_path)["digest"] == drive(with_torch, DRIVE, tmp_path)["digest"]


def test_report_without_torch_and_without_compiler(without_torch: Venv, tmp_path: Path) -> None:
    """Fault: ds_report needs what it should report as missing."""
    env = stranger(tmp_path)
    done = run(without_torch.python.parent / "ds_report", "--check", "cpu_adam", cwd=tmp_path, env=env)
    assert "cpu_adam ............... [YES] ...... [OKAY]" in done.stdout
    assert "[FAIL] torch not installed" in done.stdout
    assert re.search(r"deepspeed wheel compiled w\. \.+ .*\(sm75 sm86\)", done.stdout)
    assert "\x1b" not in done.stdout


def test_an_op_that_is_absent_is_not_silent(plain_wheel: Path, tmp_path: Path) -> None:
    """Fault (DeepSpeed#5554): the installation lacks the op that was asked for, and everything looks well."""
    venv = make_venv(tmp_path / "venv")
    install(venv, plain_wheel)
    env = stranger(tmp_path)
    report = venv.python.parent / "ds_report"
    done = run(report, "--check", "cpu_adam", cwd=tmp_path, env=env, check=False)
    assert done.returncode != 0
    assert "cpu_adam cannot work here" in done.stdout and "cpu_adam ............... [NO] ....... [NO]" in done.stdout
    assert run(report, cwd=tmp_path, env=env).returncode == 0, "without --check the report always exits 0"
    done = run(venv.python, "-c", DRIVE, cwd=tmp_path, env=env, check=False)
    assert done.returncode != 0 and "op cpu_adam: no part fits" in done.stdout and "fix:" in done.stdout


def test_an_op_asked_for_by_name_builds_or_the_installation_fails(checkout: Path, tmp_path: Path) -> None:
    """Fault (DeepSpeed#6920): DS_BUILD_X=1 without a working compiler installs happily, without the op."""
    broken = {"DS_BUILD_CPU_ADAM": "1", "CXX": shutil.which("false") or "false"}
    argv = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, checkout]
    done = run(*argv, cwd=tmp_path, env=clean_env(**broken), check=False)
    assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))
    for said in ("cpu_adam", broken["CXX"], "DS_BUILD_CPU_ADAM=0"):
        assert said in done.stdout


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"DS_BUILD_CPUADAM": "1"}, "DS_BUILD_CPU_ADAM"),
        ({"DS_BUILD_OPS": "yes"}, "DS_BUILD_OPS"),
        ({"DS_BUILD_OPS": "1", "TORCH_CUDA_ARCH_LIST": "8.6;Amper"}, "Ampere"),
        ({"DS_BUILD_OPS": "1", "CUDA_HOME": ":/usr/local/cuda"}, "CUDA_HOME"),
        ({"DS_BUILD_STRING": "_x y"}, "DS_BUILD_STRING"),
    ],
)
def test_a_wrong_variable_ends_the_build(checkout: Path, tmp_path: Path, env: dict[str, str], said: str) -> None:
    """Fault: a misspelt variable is ignored, and the build makes something else than was asked for."""
    copy = copy_checkout(tmp_path / "src")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", tmp_path / "out", "."]
    done = run(*argv, cwd=copy, env=clean_env(**env), check=False)
    assert done.returncode != 0 and said in done.stdout
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("option", ["--build-option", "--global-option"])
def test_pips_forms_of_j8(checkout: Path, tmp_path: Path, option: str) -> None:
    """Fault: the documented spelling for parallel compilers is refused, or never arrives."""
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    run(*pip, f"--config-settings={option}=build_ext -j8", checkout, cwd=tmp_path)
    assert len(list(tmp_path.glob("deepspeed-*.whl"))) == 1
    done = run(*pip, f"--config-settings={option}=build_ext -jmany", checkout, cwd=tmp_path, check=False)
    assert done.returncode != 0 and "parallel should be an integer" in done.stdout, "the option never arrives"


def test_editable_installation_keeps_parts_beside_the_sources(tmp_path: Path) -> None:
    """Fault: `DS_BUILD_CPU_ADAM=1 pip install -e .` builds into a folder that nobody looks in."""
    copy = copy_checkout(tmp_path / "src")
    venv = make_venv(tmp_path / "venv")
    install(venv, "--no-build-isolation", "-e", copy, DS_BUILD_CPU_ADAM="1")
    answer = drive(venv, DRIVE, tmp_path / "drive")
    assert str(copy.resolve() / "parts") in str(answer["part"])
    install(venv, "--no-build-isolation", "-e", copy)
    assert not (copy / "parts").exists(), "installed again without asking: no parts"
