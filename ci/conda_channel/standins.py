"""Stand-ins for what no wheel has: Python itself, compilers, the C library's floor, NVIDIA's compiler, libaio.

They have the names, the run exports and the activation scripts of conda-forge's packages, and this machine's programs
behind them. What is proved with them is the recipe; names and floors of the real packages are not.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rattler_build import Stage0Recipe, ToolConfiguration, assemble_package

from conda_channel import wheels
from conda_channel.place import BUILD_PLATFORM, CROSS_PLATFORM, Place, environment, index
from conda_channel.wheels import PYTHON_TAG, Wheel
from op_builder import conda, matrix
from op_builder.errors import UsageError

# Folders of the standard library that a run needs no more than a test suite does.
_NOT_NEEDED = ("test", "idlelib", "ensurepip", "turtledemo", "tkinter", "lib2to3", "site-packages", "__pycache__")
# Debian's cross compiler of each platform that the recipe is cross-compiled for.
TRIPLES = {"linux-64": "x86_64-linux-gnu", "linux-aarch64": "aarch64-linux-gnu"}


# What the recipe and its tests ask for beside torch and apache-tvm-ffi.
_PLAIN = ("filelock", "ninja", "nvidia-ml-py", "packaging", "pip", "rich", "setuptools", "xxhash")


def fetch(place: Place, torch: str) -> None:
    """Everything that comes from the network, as wheels.

    Args:
        place: where to.
        torch: requirement of the torch that stands in for conda-forge's pytorch.
    """
    tables = matrix.load()
    lowest = f"{tables.ffi_package}=={tables.ffi_minimum}"
    newest = f"{tables.ffi_package}>={tables.ffi_minimum},<{tables.ffi_below}"
    wheels.download(place.wheels, torch, newest, *_PLAIN)
    wheels.download(place.wheels / "lowest", lowest, dependencies=False)
    options = ("--platform", tables.platform("linux-aarch64").wheel, "--python-version", tables.pythons[-1])
    wheels.download(place.wheels / CROSS_PLATFORM, lowest, options=options, dependencies=False)
    for release in conda.ship_releases():
        wheels.download(_nvrtc(place, release), tables.release(release).nvrtc, dependencies=False)


def _nvrtc(place: Place, release: tuple[int, int]) -> Path:
    return place.wheels / f"nvrtc-{matrix.dotted(release)}"


def make(place: Place) -> None:
    """The stand-in channel, from what :func:`fetch` brought and what this machine has."""
    shutil.rmtree(place.standins, ignore_errors=True)
    place.standins.mkdir(parents=True)
    others = [p.conda for p in matrix.load().platforms.values() if p.conda != BUILD_PLATFORM]
    real = [Wheel.read(file) for file in sorted((place.wheels / CROSS_PLATFORM).glob("*.whl"))]
    there = {(CROSS_PLATFORM, wheel.name, wheel.version) for wheel in real}
    with environment(place):
        python(place.standins, place.work)
        compilers(place.standins, (BUILD_PLATFORM, CROSS_PLATFORM))
        libaio(place.standins, place.work, others)
        for subdir in others:
            empty(place.standins, subdir, "python", platform.python_version())
        for file in sorted([*place.wheels.glob("*.whl"), *(place.wheels / "lowest").glob("*.whl")]):
            wheel = Wheel.read(file)
            wheels.assemble(wheel, place.standins, place.work, BUILD_PLATFORM)
            for subdir in others:
                if not wheel.pure and (subdir, wheel.name, wheel.version) not in there:  # solved for, never installed
                    empty(place.standins, subdir, wheel.conda_name, wheel.conda_version, list(wheel.depends()))
        for wheel in real:
            wheels.assemble(wheel, place.standins, place.work, CROSS_PLATFORM)
        gpu_compilers(place, {release: next(_nvrtc(place, release).glob("*.whl")) for release in conda.ship_releases()})
    shutil.rmtree(place.work, ignore_errors=True)
    index(place.standins)


def _run(*argv: str | Path) -> str:
    done = subprocess.run(
        [str(a) for a in argv], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise UsageError(f"{Path(argv[0]).name} ended with {done.returncode}", done.stderr.strip()[-800:], "")
    return done.stdout


def empty(
    channel: Path, subdir: str, name: str, version: str, depends: Sequence[str] = (), build: str = "standin_0"
) -> None:
    """A package without files: the machine has what it stands for, or only its name is asked for."""
    place = channel / subdir
    place.mkdir(parents=True, exist_ok=True)
    assemble_package(
        name=name, version=version, target_platform=subdir, build_string=build, output_dir=place, files=[],
        depends=depends, noarch="generic" if subdir == "noarch" else None, compression_level=1, detect_prefix=False,
    )  # fmt: skip


def python(channel: Path, work: Path) -> None:
    """This interpreter, copied from its base prefix and made relocatable."""
    shutil.rmtree(work, ignore_errors=True)
    base, stdlib = Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))
    skipped = shutil.ignore_patterns(*_NOT_NEEDED, "config-*", "*.a")
    shutil.copytree(stdlib, work / "lib" / PYTHON_TAG, ignore=skipped, symlinks=False)
    (work / "lib" / PYTHON_TAG / "site-packages").mkdir()
    binary = work / "bin" / PYTHON_TAG
    binary.parent.mkdir()
    shutil.copy2(Path(sys.executable).resolve(), binary)
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        for library in sorted((base / "lib").glob(f"lib{PYTHON_TAG}.so*")):
            shutil.copy2(library.resolve(), work / "lib" / library.name)
    for file in (binary, *(work / "lib").glob("*.so*")):
        _run("strip", file)
        _run("patchelf", "--set-rpath", "$ORIGIN/../lib", file)
    for name in ("python", "python3"):
        shutil.copy2(binary, work / "bin" / name)
    place = channel / "linux-64"
    place.mkdir(parents=True, exist_ok=True)
    assemble_package(
        name="python", version=platform.python_version(), target_platform="linux-64", build_string="standin_cpython",
        output_dir=place, files_dir=work, compression_level=1, detect_prefix=False,
    )  # fmt: skip


def libaio(channel: Path, work: Path, others: Sequence[str]) -> None:
    """This machine's own; for other platforms nothing but the name."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "lib").mkdir(parents=True)
    place = next((p for p in Path("/usr/lib").glob("*-linux-gnu/libaio.so.1*") if not p.is_symlink()), None)
    if place is None:
        raise UsageError("libaio.so.1 was not found", "the recipe depends on it", "apt-get install libaio1")
    shutil.copy2(place, work / "lib" / "libaio.so.1")
    assemble_package(
        name="libaio", version="0.3", target_platform=BUILD_PLATFORM, build_string="standin_linux_64_0",
        output_dir=channel / BUILD_PLATFORM, files_dir=work, compression_level=1, detect_prefix=False,
    )  # fmt: skip
    for subdir in others:
        if subdir.startswith("linux"):
            empty(channel, subdir, "libaio", "0.3")


def by_recipe(
    channel: Path, name: str, version: str, subdir: str, files: Mapping[str, str], exports: Sequence[str]
) -> None:
    """A package with run exports, which only a recipe can give it.

    Args:
        channel: where it goes, and where its (no) dependencies come from.
        name: of the package.
        version: of the package.
        subdir: its platform, or ``noarch``.
        files: text by path below the prefix.
        exports: strong run exports.
    """
    script = [
        line
        for path, text in files.items()
        for line in (f'mkdir -p "$(dirname "$PREFIX/{path}")"', f"cat > \"$PREFIX/{path}\" <<'EOF'\n{text}\nEOF")
    ]
    recipe = {
        "schema_version": 1,
        "package": {"name": name, "version": version},
        "build": {"number": 0, "string": "standin_0", "script": script or ["true"]}
        | ({"noarch": "generic"} if subdir == "noarch" else {}),
        "requirements": {"run_exports": {"strong": list(exports)}},
    }
    for variant in Stage0Recipe.from_dict(recipe).render():
        variant.run_build(tool_config=ToolConfiguration(test_strategy="skip"), output_dir=channel, channels=[])


def compilers(channel: Path, platforms: Sequence[str]) -> None:
    """gxx_<platform>, its runtime, and the sysroot whose version is this machine's glibc."""
    glibc = platform.libc_ver()[1]
    for target in platforms:
        triple = TRIPLES[target]
        version = _run(f"{triple}-g++", "-dumpfullversion").strip()
        activate = f"export CXX={triple}-g++ CC={triple}-gcc CXXFLAGS='-march=nocona -O2' LDFLAGS='-Wl,-O2'"
        files = {f"etc/conda/activate.d/activate-gxx_{target}.sh": activate}
        by_recipe(channel, f"gxx_{target}", version, "linux-64", files, ["libstdcxx", "libgcc"])
        by_recipe(channel, f"sysroot_{target}", glibc, "noarch", {}, [f"__glibc >={glibc},<3.0.a0"])
        for name in ("libstdcxx", "libgcc"):
            empty(channel, target, name, version)


def gpu_compilers(place: Place, found: Mapping[tuple[int, int], Path]) -> None:
    """cuda-nvcc of each release: NVIDIA's run-time compiler of that release, since PyPI has no nvcc of CUDA 12."""
    work = place.work
    for release, wheel in found.items():
        shutil.rmtree(work, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if "/lib/lib" in name:
                    target = work / "lib" / Path(name).name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
        assemble_package(
            name="cuda-nvcc_linux-64", version=matrix.dotted(release), target_platform="linux-64",
            build_string="standin_nvrtc", output_dir=place.standins / "linux-64", files_dir=work, compression_level=1,
            detect_prefix=False,
        )  # fmt: skip
