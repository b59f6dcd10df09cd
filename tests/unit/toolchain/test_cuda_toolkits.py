"""nvcc and NVRTC: found wherever they lie, the release by their own word, and nothing loaded."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from op_builder import cuda_toolkits as cuda
from op_builder.commands import Completed, Problem
from op_builder.cubin import read_gpu
from op_builder.errors import SettingError
from op_builder.gpus import Driver
from op_builder.host import HostFacts
from op_builder.matrix import load
from op_builder.settings import Settings
from op_builder.targets import Target
from op_builder.toolchain import discover_gpu, run_command

LINUX = HostFacts("linux", "x86_64", "glibc", (2, 36))
posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake tools are shell scripts")
ARCHS = {"12.4": (50, 52, 75, 80, 86, 90), "13.0": (75, 80, 90, 100)}


def nvcc(home: Path, release: str = "12.4", wrapper: Path | None = None) -> Path:
    """A fake nvcc of a toolkit at ``home``; with ``wrapper``, a script elsewhere that runs it."""
    path = home / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = "\n".join(f"compute_{n}" for n in ARCHS[release])
    path.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"--version) printf 'Cuda compilation tools, release {release}, V{release}.131\\n';;\n"
        f"--dryrun) printf '#$ _HERE_=x\\n#$ TOP={home}/bin/..\\n' >&2;;\n"
        f"--list-gpu-arch) printf '{listed}\\n';;\nesac\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    if wrapper is not None:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        wrapper.write_text(f'#!/bin/sh\nexec "{path}" "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
    return path


def gpu(env: Mapping[str, str], root: Path, paths: Sequence[str] = ()) -> object:
    return discover_gpu(Settings.read({"PATH": os.defpath, **env}), LINUX, paths=paths, root=root)


def find(env: Mapping[str, str], root: Path, home: str | None = None, paths: Sequence[str] = ()) -> list[cuda.Nvcc]:
    found, _ = cuda.find_nvcc(env, home, lambda argv: run_command(argv), paths=paths, root=root)
    return list(found)


# --- nvcc (DeepSpeed#2924, #5511, #2055) --------------------------------------------------------------------------


@posix
def test_by_path_only(tmp_path: Path) -> None:
    """Fault: nvcc on PATH without CUDA_HOME is not found, or its release guessed from the folder's name."""
    home = tmp_path / "cu-99.9"
    nvcc(home)
    (one,) = find({"PATH": str(home / "bin")}, tmp_path)
    assert (one.home, one.version, one.identity) == (home, (12, 4), "nvcc 12.4.131")
    assert [t.number for t in one.archs] == list(ARCHS["12.4"])
    assert one.targets(Target(9, 0)) and one.targets(Target(9, 0, "sass", "a")) and one.targets(Target(7, 5, "ptx"))
    assert not one.targets(Target(10, 0)) and not one.targets(Target(9, 0, "sass", "f"))


@posix
def test_through_a_wrapper(tmp_path: Path) -> None:
    """Fault: a shim in /usr/local/bin makes /usr/local the toolkit."""
    nvcc(tmp_path / "toolkit", wrapper=tmp_path / "bin" / "nvcc")
    (one,) = find({"PATH": str(tmp_path / "bin")}, tmp_path)
    assert one.home == tmp_path / "toolkit" and one.path == tmp_path / "bin" / "nvcc"


@posix
def test_order_and_no_repetition(tmp_path: Path) -> None:
    """Fault: CUDA_HOME ignored; one toolkit found by three ways counted three times."""
    asked, other = tmp_path / "asked", tmp_path / "usr/local/cuda-13.0"
    nvcc(asked)
    nvcc(other, "13.0")
    (tmp_path / "usr/local/cuda").symlink_to(other)
    found = find({"PATH": f"{other / 'bin'}:{asked / 'bin'}"}, tmp_path, str(asked))
    assert [(n.home.resolve(), n.version) for n in found] == [(asked, (12, 4)), (other, (13, 0))]


@posix
@pytest.mark.parametrize("place", ["conda", "wheel13", "wheel12", "local"])
def test_other_places(tmp_path: Path, place: str) -> None:
    """Fault: toolkits of conda and of wheels are unknown."""
    root = tmp_path / "root"
    homes = {
        "conda": tmp_path / "env",
        "wheel13": tmp_path / "site/nvidia/cu13",
        "wheel12": tmp_path / "site/nvidia/cuda_nvcc",
        "local": root / "usr/local/cuda-12.4",
    }
    nvcc(homes[place])
    env = {"PATH": "", "CONDA_PREFIX": str(tmp_path / "env")}
    assert [n.home for n in find(env, root, None, [str(tmp_path / "site")])] == [homes[place]]


def test_conda_without_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: under `env -i` the environment's own NVRTC is unknown (CONDA_PREFIX is set by activation only)."""
    (tmp_path / "conda-meta").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert list(cuda.conda_prefixes({})) == [tmp_path] == list(cuda.conda_prefixes({"CONDA_PREFIX": str(tmp_path)}))
    assert list(cuda.conda_prefixes({"CONDA_PREFIX": "/base"})) == [tmp_path, Path("/base")]


@posix
def test_a_toolkit_with_a_blank_in_its_path(tmp_path: Path) -> None:
    """Fault: quoting (pytorch#122476)."""
    nvcc(tmp_path / "my cuda")
    (one,) = find({"PATH": ""}, tmp_path, str(tmp_path / "my cuda"))
    assert one.home == tmp_path / "my cuda"


def test_cuda_home_as_a_list() -> None:
    """Fault: CUDA_HOME=":/usr/local/cuda" is joined to ":/usr/local/cuda/bin/nvcc" and read as absent."""
    with pytest.raises(SettingError) as caught:
        Settings.read({"CUDA_HOME": ":/usr/local/cuda"})
    assert ":/usr/local/cuda" in str(caught.value)


@posix
def test_cuda_home_without_nvcc_and_broken_nvcc(tmp_path: Path) -> None:
    """Fault: a wrong CUDA_HOME is passed over without a word; a dead nvcc ends in a traceback."""
    dead = tmp_path / "dead" / "bin" / "nvcc"
    dead.parent.mkdir(parents=True)
    dead.write_text("#!/bin/sh\necho segfault\nexit 139\n", encoding="utf-8")
    dead.chmod(0o755)
    env = {"PATH": str(dead.parent)}
    found, problems = cuda.find_nvcc(env, str(tmp_path / "none"), lambda argv: run_command(argv), root=tmp_path)
    assert not found and len(problems) == 2
    assert "CUDA_HOME" in problems[0].what and "none" in problems[0].what
    assert "segfault" in problems[1].why and all(p.fix for p in problems)


@posix
def test_nvcc_of_a_wheel_without_the_right_to_execute(tmp_path: Path) -> None:
    """Fault: "Permission denied" with the advice to install the toolkit again."""
    path = nvcc(tmp_path / "nvidia/cu13")
    path.chmod(0o644)
    found, problems = cuda.find_nvcc(
        {"PATH": ""}, None, lambda argv: run_command(argv), paths=[str(tmp_path)], root=tmp_path
    )
    assert not found and "chmod +x" in problems[0].fix and str(path) in problems[0].fix


def test_archs_fall_back_on_the_matrix(tmp_path: Path) -> None:
    """Fault: a compiler that cannot list its architectures counts as having none."""

    def run(argv: Sequence[str]) -> Completed:
        return Completed(0, "release 12.1, V12.1.105") if argv[1] == "--version" else Completed(1)

    one = cuda.ask_nvcc(tmp_path / "bin" / "nvcc", run)
    assert not isinstance(one, Problem)
    assert tuple(t.capability for t in one.archs) == load().targets_of((12, 1))


def test_an_architecture_newer_than_the_matrix(tmp_path: Path) -> None:
    """Fault: a new GPU with a new compiler is refused because this package is older than both."""
    answers = {"--version": "release 19.0, V19.0.1", "--list-gpu-arch": "compute_90\ncompute_142"}
    one = cuda.ask_nvcc(tmp_path / "nvcc", lambda argv: Completed(0, answers.get(argv[1], "")))
    assert not isinstance(one, Problem)
    assert one.targets(Target(14, 2)) and not one.targets(Target(14, 2, "sass", "a"))


def test_the_nvcc_of_this_machine(tmp_path: Path) -> None:
    """Fault: our reading of nvcc's answers, flags and cubins fits fakes only."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    found = find(os.environ, tmp_path)
    assert found and (found[0].home / "bin").is_dir()
    source, out = tmp_path / "k.cu", tmp_path / "k.cubin"
    source.write_text('extern "C" __global__ void kernel(float *p) { *p = 1; }\n', encoding="utf-8")
    for target in (found[0].archs[0], Target(9, 0), Target(9, 0, "sass", "a")):
        argv = [str(found[0].path), "-cubin", target.gencode, "-o", str(out), str(source)]
        answer = run_command(argv, timeout_s=120)
        assert answer.ok, answer.output
        facts = read_gpu(out.read_bytes())
        assert (facts.target, facts.kernels) == (target, ("kernel",))


# --- NVRTC --------------------------------------------------------------------------------------------------------


def library(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "version", "chosen", "builtins"),
    [
        (["libnvrtc.so.12", "libnvrtc-builtins.so.12.8", "libnvrtc.alt.so.12"], (12, 8), "libnvrtc.so.12", True),
        (
            ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"],
            (13, 0),
            "libnvrtc.so.13",
            True,
        ),
        (["libnvrtc.so.12.4.127"], (12, 4), "libnvrtc.so.12.4.127", False),
        (["libnvrtc-672ee683.so.12", "libnvrtc-builtins-2dc4bf68.so.12.1"], (12, 1), "libnvrtc-672ee683.so.12", True),
        (["libnvrtc.so", "libnvrtc-builtins.so.12.6"], (12, 6), "libnvrtc.so", True),
        (
            ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.12.9", "libnvrtc-builtins.so.13.0"],
            (13, 0),
            "libnvrtc.so.13",
            True,
        ),
        (
            ["nvrtc64_120_0.dll", "nvrtc-builtins64_128.dll", "nvrtc64_120_0.alt.dll"],
            (12, 8),
            "nvrtc64_120_0.dll",
            True,
        ),
        (["nvrtc64_130_0.dll", "nvrtc-builtins64_130.dll"], (13, 0), "nvrtc64_130_0.dll", True),
    ],
)
def test_release_by_file_names(
    tmp_path: Path, names: list[str], version: tuple[int, int], chosen: str, builtins: bool
) -> None:
    """Fault: libnvrtc.so.12 is taken for release 12.0; the `alt` build or other builtins are chosen."""
    found = cuda.nvrtc_in(library(tmp_path, *names), "pypi")
    assert found is not None
    assert (found.version, found.library.name, found.builtins is not None) == (version, chosen, builtins)
    assert found.identity == f"nvrtc {version[0]}.{version[1]}"
    assert tuple(t.capability for t in found.archs) == load().targets_of(version)


@pytest.mark.parametrize("names", [[], ["libnvrtc.so.12"], ["libnvrtc_static.a"], ["libnvrtc-builtins.so.12.8"]])
def test_no_release_no_library(tmp_path: Path, names: list[str]) -> None:
    """Fault: a library of unknown release gets a made-up key."""
    assert cuda.nvrtc_in(library(tmp_path, *names), "system") is None
    assert cuda.nvrtc_in(tmp_path / "absent", "system") is None


def test_order_of_places(tmp_path: Path) -> None:
    """Fault: the system's NVRTC preferred to torch's own, which the process will load anyway."""
    site, other, root = tmp_path / "site", tmp_path / "other", tmp_path / "root"
    names = ("libnvrtc.so.12", "libnvrtc-builtins.so.12.8")
    library(site / "torch")
    (site / "torch/__init__.py").touch()
    library(site / "nvidia/cuda_nvrtc/lib", *names)
    library(other / "nvidia/cu13/lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0")
    library(tmp_path / "env/lib", *names)
    library(root / "usr/local/cuda-12.1/lib64", *names)
    library(root / "usr/lib/x86_64-linux-gnu", "libnvrtc.so.12.4.127")
    found = gpu({"CONDA_PREFIX": str(tmp_path / "env")}, root, [str(other), str(site)])
    sources = [(n.source, n.version) for n in found.nvrtc]  # type: ignore[attr-defined]
    assert sources == [
        ("pypi", (13, 0)),
        ("torch", (12, 8)),
        ("conda", (12, 8)),
        ("system", (12, 8)),
        ("system", (12, 4)),
    ]


def test_loaded_library_by_maps(tmp_path: Path) -> None:
    """Fault: paths with blanks cut; builtins or a deleted line taken for the library."""
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 123 /opt/a b/lib/libnvrtc.so.12\n"
        "7f01-7f02 r--p 00000000 08:01 123 /opt/a b/lib/libnvrtc.so.12\n"
        "7f02-7f03 r-xp 00000000 08:01 124 /opt/a b/lib/libnvrtc-builtins.so.12.8\n"
        "7f03-7f04 rw-p 00000000 00:00 0 \n7f04-7f05 rw-p 00000000 00:00 0                  [heap]\n"
    )
    assert list(cuda.loaded_nvrtc(maps)) == [Path("/opt/a b/lib/libnvrtc.so.12")]
    folder = library(tmp_path / "lib", "libnvrtc.so.12", "libnvrtc-builtins.so.12.8")
    (one,) = cuda.find_nvrtc([(folder, "torch")], [folder / "libnvrtc.so.12"])
    assert one.source == "loaded"


def test_linker_cache_is_the_last_resort(tmp_path: Path) -> None:
    """Fault: a toolkit in an odd folder that the linker knows is not found; ldconfig runs on every start."""
    folder = library(tmp_path / "odd", "libnvrtc.so.12", "libnvrtc-builtins.so.12.5")
    text = (
        f"2 libs\n\tlibnvrtc.so.12 (libc6,x86-64) => {folder}/libnvrtc.so.12\n\tlibm.so.6 (libc6) => /lib/libm.so.6\n"
    )
    assert cuda.parse_ldconfig(text) == (folder / "libnvrtc.so.12",)
    (one,) = cuda.find_nvrtc([], (), lambda: cuda.parse_ldconfig(text))
    assert one.version == (12, 5)

    def never() -> tuple[Path, ...]:
        raise AssertionError("asked though a library was found")

    assert len(cuda.find_nvrtc([(folder, "conda")], (), never)) == 1


def test_nothing_found_names_what_to_install(tmp_path: Path) -> None:
    """Fault: "nvcc not found" where one wheel would do; a wheel that the driver is too old for."""
    for cuda_version, prefix in (((12, 2), "nvidia-cuda-nvrtc-cu12=="), ((13, 0), "nvidia-cuda-nvrtc==")):
        host = HostFacts("linux", "x86_64", driver=Driver("535.1", cuda_version))
        settings = Settings.read({"PATH": str(tmp_path)})
        found = discover_gpu(settings, host, run=lambda argv: Completed(1), paths=[], root=tmp_path)
        assert not found.nvcc and not found.nvrtc
        assert re.match(r"pip install " + re.escape(prefix), found.problems[-1].fix)
