"""What ``ds_report`` says on machines that are not here: verdict, reasons and commands, on recorded hosts."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ops import ops_report, report, report_advice, report_data, report_features
from deepspeed_ops.report_data import Report, TorchFacts
from op_builder import toolchain
from op_builder.commands import Problem
from op_builder.distribution import Distribution, read_distribution
from op_builder.gpus import Device, Driver
from op_builder.host import HostFacts
from op_builder.packages import MANAGERS, PACKAGES, install_command
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.targets import Target
from op_builder.toolchain import FFI, HostCompiler, Nvrtc, Toolchain

ROOT = Path(__file__).resolve().parents[3]
DEBIAN = Distribution("debian", "Debian 12", "apt")
GLIBC = {"libc": "glibc", "libc_version": (2, 36)}
LINUX = HostFacts("linux", "x86_64", **GLIBC)  # type: ignore[arg-type]
A100 = Device(0, "GPU-1", "NVIDIA A100", (8, 0), 80 << 30)
GPU = dataclasses.replace(LINUX, driver=Driver("550.54.15", (12, 4)), devices=(A100,))
CPU_TORCH, CUDA_TORCH = TorchFacts("2.13.0+cpu", ("t",)), TorchFacts("2.6.0", ("t",), "12.4")

GXX = HostCompiler("gcc", Path("/usr/bin/g++"), (12, 2, 0), "x86_64-linux-gnu", "g++ 12.2.0", ("/usr/bin/g++",))
TVM = FFI((Path("/f/include"),), Path("/f/lib"), Path("/f/lib/libtvm_ffi.so"), "0.1.15")
NVRTC = Nvrtc(
    Path("/t/libnvrtc.so.12"),
    Path("/t/libnvrtc-builtins.so"),
    (12, 4),
    tuple(Target(n // 10, n % 10) for n in (60, 75, 80, 90)),
    "torch",
)
FULL = Toolchain(GXX, Path("/usr/bin/ninja"), (), (NVRTC,), TVM)
NO_CXX = Problem("no C++ compiler was found", "PATH has none of g++, clang++, c++", "install one")
BARE = Toolchain(None, Path("/usr/bin/ninja"), (), (NVRTC,), TVM, (NO_CXX,))


@dataclass
class Recorded:
    """One machine and what the report must say of it."""

    host: HostFacts = LINUX
    tools: Toolchain = FULL
    torch: TorchFacts = CPU_TORCH
    at: Distribution = DEBIAN
    env: dict[str, str] = field(default_factory=dict)
    verdict: str = "ready: 4 of 8 ops work here; 4 need a GPU, and none is visible"
    says: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


UTILITY = (
    "GPU device files exist (nvidia0) but NVML does not answer: a container needs the driver capability `utility` "
    "(NVIDIA_DRIVER_CAPABILITIES=compute; use compute,utility)"
)
WSL = "WSL: NVML comes with the Windows driver in /usr/lib/wsl/lib; update that driver (wsl --update)"
CL = Problem("no C++ compiler was found", "cl is not on PATH", "winget install Microsoft.VisualStudio.2022.BuildTools")

OPS = ("clip_grad_norm", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion", "utils")
HOSTS = {
    "a plain CPU machine": Recorded(),
    "a GPU machine": Recorded(host=GPU, torch=CUDA_TORCH, verdict="ready: all 8 ops work here"),
    "no compiler": Recorded(
        tools=BARE,
        verdict="partly: 1 of 8 ops work here; not clip_grad_norm, cpu_adagrad",
        says=("no C++ compiler was found: PATH has none of g++, clang++, c++",),
        commands=("sudo apt-get update && sudo apt-get install -y g++",),
    ),
    "no compiler, Rocky": Recorded(
        tools=BARE,
        at=Distribution("rocky", "Rocky Linux 9", "dnf", root=True),
        verdict="partly:",
        commands=("dnf install -y gcc-c++",),
    ),
    "no compiler, conda": Recorded(
        tools=BARE,
        at=Distribution("debian", "Debian 12", "apt", conda="/c"),
        verdict="partly:",
        commands=("conda install -y -c conda-forge cxx-compiler",),
    ),
    "no compiler, a container": Recorded(
        tools=BARE,
        at=dataclasses.replace(DEBIAN, container="docker", root=True),
        verdict="partly:",
        commands=("# in the Dockerfile, to keep it: RUN apt-get update && apt-get install -y g++",),
    ),
    "an old driver": Recorded(
        host=dataclasses.replace(GPU, driver=Driver("470.82.01", (11, 4))),
        torch=CUDA_TORCH,
        verdict="partly: 4 of 8 ops work here; not clip_grad_norm, fused_adam, fused_lamb, fused_lion",
        says=("the driver serves CUDA 11.4; loading GPU parts needs 12.0 (driver 525)",),
        commands=("sudo apt-get install -y nvidia-driver", "sudo reboot"),
    ),
    "ROCm": Recorded(
        torch=TorchFacts("2.6.0+rocm6.2", ("t",), None, "6.2"),
        verdict="ready: 4 of 8 ops work here; 4 need an NVIDIA GPU, and this torch is built for ROCm",
        says=("no GPU op works with a ROCm torch", "# no command changes that"),
    ),
    "aarch64": Recorded(
        host=dataclasses.replace(LINUX, machine="aarch64"),
        tools=dataclasses.replace(FULL, host=dataclasses.replace(GXX, target="aarch64-linux-gnu"), nvrtc=()),
    ),
    "WSL2 without a driver": Recorded(
        host=dataclasses.replace(LINUX, wsl=True, notes=(WSL,)),
        says=(WSL,),
        commands=("wsl --update", "wsl --shutdown"),
    ),
    "WSL2 with an old driver": Recorded(
        host=dataclasses.replace(GPU, wsl=True, driver=Driver("470.10", (11, 4))),
        torch=CUDA_TORCH,
        verdict="partly:",
        commands=("wsl --update", "# on Windows, not in WSL: install NVIDIA's driver for Windows, 527 or newer"),
    ),
    "a container without utility": Recorded(
        host=dataclasses.replace(LINUX, notes=(UTILITY,)),
        at=dataclasses.replace(DEBIAN, container="docker"),
        says=(UTILITY,),
        commands=("docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE",),
    ),
    "Windows without Visual Studio": Recorded(
        host=HostFacts("windows", "x86_64"),
        tools=Toolchain(None, Path("ninja"), ffi=TVM, problems=(CL,)),
        at=Distribution("windows", "Windows"),
        verdict="partly: 1 of 8 ops work here",
        commands=("winget install Microsoft.VisualStudio.2022.BuildTools",),
    ),
    "torch missing": Recorded(
        torch=TorchFacts(problem="not installed"),
        verdict="broken: torch is not installed",
        commands=("python -m pip install torch --index-url https://download.pytorch.org/whl/cpu",),
    ),
    "torch missing, CUDA 12.4": Recorded(
        host=GPU,
        torch=TorchFacts(problem="not installed"),
        verdict="broken: torch is not installed",
        commands=("python -m pip install torch --index-url https://download.pytorch.org/whl/cu128",),
    ),
    "torch broken": Recorded(
        torch=TorchFacts(problem="does not import (exit status 1): ImportError: libcudart.so.12"),
        verdict="broken: torch is broken (does not import (exit status 1): ImportError: libcudart.so.12)",
        commands=("python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu",),
    ),
    "torch of the CPU on a GPU": Recorded(
        host=GPU,
        verdict="ready: all 8 ops work here",
        says=("torch does not use the GPU",),
        commands=("python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128",),
    ),
    "no kernel image: a GPU too old": Recorded(
        host=dataclasses.replace(GPU, devices=(dataclasses.replace(A100, name="GTX 980", capability=(5, 2)),)),
        torch=CUDA_TORCH,
        verdict="partly: 4 of 8 ops work here",
        says=("op fused_adam needs compute capability 6.0, the device has 5.2",),
    ),
    "another environment": Recorded(
        env={"VIRTUAL_ENV": "/other/venv"},
        says=("this is not the active environment", "VIRTUAL_ENV=/other/venv"),
        commands=("python -m deepspeed.env_report",),
    ),
}


def made(recorded: Recorded, tmp_path: Path) -> Report:
    """The report on a recorded machine, over the sources of this checkout and an empty store."""
    settings = Settings.read({"TORCH_EXTENSIONS_DIR": str(tmp_path), "HOME": str(tmp_path)})
    seen = ops_report.resolve_all(settings, recorded.host, recorded.tools, recorded.at, ROOT, [])
    return report_data.assemble(seen, recorded.torch, recorded.env, ROOT)


def text(lines: Any) -> str:
    out = io.StringIO()
    report.write(list(lines), out, colour=False)
    return out.getvalue()


@pytest.fixture(autouse=True)
def no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout that runs the tests may hold parts, and its environment /dev/shm of any size."""
    monkeypatch.setattr(ops_report.Loader, "__init__", without_package(ops_report.Loader.__init__))
    monkeypatch.setattr(report_data, "_shm_bytes", lambda: 8 << 30)
    monkeypatch.setattr(report_data, "_owners", lambda: ("deepspeed",))
    # The counts below are of these eight ops, whatever the registry gains.
    some = {name: spec for name, spec in all_specs().items() if name in OPS}
    monkeypatch.setattr(ops_report, "all_specs", lambda: some)
    monkeypatch.setattr(report_features, "all_specs", lambda: some)


def without_package(make: Any) -> Any:
    def wrapped(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.stores = tuple(s for s in self.stores if s.origin == "jit")

    return wrapped


@pytest.mark.parametrize("name", HOSTS)
def test_every_message_of_a_recorded_host(name: str, tmp_path: Path) -> None:
    """Fault: "not compatible" without reason or fitting command; --json that breaks a fleet's tool on one host."""
    recorded = HOSTS[name]
    shown = made(recorded, tmp_path)
    follows_the_schema(shown)
    assert shown.verdict.text.startswith(recorded.verdict), shown.verdict.text
    whole = text([*report.lines(shown), *report.fix_lines(shown)])
    for said in recorded.says:
        assert said in whole
    commands = [c for advice in shown.fixes for c in advice.commands]
    assert set(recorded.commands) <= set(commands), commands
    if not recorded.commands:
        assert commands == []
    assert whole.splitlines()[0] == shown.verdict.text


def follows_the_schema(shown: Report) -> None:
    """Raises where the report's JSON is not of the published schema, or holds a key that the schema does not name."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(report.SCHEMA_FILE.read_text(encoding="utf-8"))
    data = json.loads(json.dumps(shown.as_dict()))
    jsonschema.validate(data, schema)
    assert set(data) == set(schema["required"])


def test_the_schema_refuses_what_is_not_a_report(tmp_path: Path) -> None:
    """Fault: a schema that takes anything."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(report.SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(json.dumps(made(HOSTS["a GPU machine"], tmp_path).as_dict()))
    for key in data:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in data.items() if k != key}, schema)
    data["ops"][0]["ways"][0]["action"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_the_schema_is_printed_without_looking_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the schema cannot be had where it is needed: beside the report that it describes."""
    monkeypatch.setattr(report, "gather", lambda: pytest.fail("looked"))
    out = io.StringIO()
    assert report.main(["--schema"], out=out) == 0 and json.loads(out.getvalue())["title"] == "ds_report --json"


def test_why_shows_every_reason_and_the_table_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: twenty reasons per op hide the one line that counts; or the twentieth can nowhere be read."""
    from deepspeed_ops.report_data import OpLine, Way

    way = Way("host library", "load", "load a.so", tuple(f"reason {n}" for n in range(9)))
    shown = dataclasses.replace(
        made(HOSTS["a plain CPU machine"], tmp_path), ops=(OpLine("cpu_adam", True, True, (way,)),)
    )
    table = text(report.lines(shown))
    assert "reason 2" in table and "reason 3" not in table and "and 6 more: ds_report --why cpu_adam" in table
    assert "reason 8" in text(report.why_lines(shown, "cpu_adam"))
    monkeypatch.setattr(report, "gather", lambda: shown)
    out = io.StringIO()
    assert report.main(["--why", "cpu_adam"], out=out) == 0 and "reason 8" in out.getvalue()
    assert report.main(["--why", "cpu_adm"], out=out) == 2


def test_fix_prints_nothing_to_paste_where_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: advice to install a driver on a machine that has no GPU."""
    shown = made(HOSTS["a plain CPU machine"], tmp_path)
    monkeypatch.setattr(report, "gather", lambda: shown)
    out = io.StringIO()
    assert report.main(["--fix"], out=out) == 0
    assert "nothing to fix" in out.getvalue()


def test_needs_of_specs_become_packages() -> None:
    """Fault: "needs libaio", and the user searches what that is called on SUSE."""
    from deepspeed_ops.report_data import OpLine, Way

    why = ("build here: needs: libaio: no libaio.h",)
    line = OpLine("some_io", False, False, (Way("host library", "fail", "no part fits", why, "install libaio"),))
    for at, command in (
        (DEBIAN, "sudo apt-get update && sudo apt-get install -y libaio-dev"),
        (Distribution("opensuse-leap", "Leap", "zypper", root=True), "zypper install -y libaio-devel"),
        (Distribution("debian", "", "apt", conda="/c"), "conda install -y -c conda-forge libaio"),
        (Distribution("gentoo", "Gentoo"), "install libaio"),
    ):
        facts = report_advice.Facts(LINUX, at, CPU_TORCH, FULL, [line])
        (advice,) = report_advice.advise(facts)
        assert advice.problem == "some_io needs libaio" and advice.commands == (command,)


def test_needs_are_found_missing_or_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a library is called found because nobody said that it is missing."""
    from deepspeed_ops.ops_report import Seen
    from deepspeed_ops.report_data import OpLine, Way
    from tests.toys import toy_spec

    monkeypatch.setattr(report_features, "all_specs", lambda: {"io": toy_spec("io", needs=["libaio"])})
    host = Way("host library", "load", "a.so")
    refused = Way("host library", "fail", "none", ("build here: needs: libaio: no libaio.h",))
    cases = (((host,), "found"), ((refused,), "missing"), ((), ""))
    cases += (((host, Way("libaio", "absent", "x")), "missing"), ((host, Way("libaio", "load", "x")), "found"))
    for ways, state in cases:
        seen = Seen(LINUX, FULL, [OpLine("io", False, False, ways)], [], DEBIAN)
        (line,) = [f for f in report_features.feature_lines(seen) if f.feature == "io"]
        assert (line.state, line.package) == (state, "apt: libaio-dev")


def test_two_owners_of_the_name() -> None:
    """Fault: the engine and this distribution overwrite each other's files, and something fails to import."""
    facts = report_advice.Facts(LINUX, DEBIAN, CPU_TORCH, FULL, [], owners=("deepspeed", "deepspeed-nightly"))
    (advice,) = report_advice.advise(facts)
    assert (
        "two distributions own the name" in advice.problem
        and "uninstall -y deepspeed deepspeed-nightly" in advice.commands[0]
    )


@pytest.mark.parametrize(
    ("container", "command"),
    [("", "sudo mount -o remount"), ("docker", "docker run --shm-size=8g"), ("kubernetes", "emptyDir")],
)
def test_small_shared_memory(container: str, command: str) -> None:
    """Fault: docker's advice to somebody who runs in Kubernetes."""
    at = dataclasses.replace(DEBIAN, container=container)
    (advice,) = report_advice.advise(report_advice.Facts(LINUX, at, CPU_TORCH, FULL, [], shm_small=True))
    assert command in advice.commands[0]


RELEASES = {
    "debian": ('ID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n', "apt"),
    "ubuntu": ("ID=ubuntu\nID_LIKE=debian\n", "apt"),
    "mint": ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "apt"),
    "rocky": ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf"),
    "leap": ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper"),
    "arch": ("ID=arch\n", "pacman"),
    "alpine": ("ID=alpine\n", "apk"),
    "nixos": ("ID=nixos\n", ""),
}


@pytest.mark.parametrize("name", RELEASES)
def test_distributions(name: str, tmp_path: Path) -> None:
    """Fault: apt-get on Rocky; a crash where os-release is missing."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(RELEASES[name][0], encoding="utf-8")
    found = read_distribution({}, root=tmp_path, system="linux", prefix=str(tmp_path), uid=1000)
    assert (found.manager, found.container, found.conda, found.root) == (RELEASES[name][1], "", "", False)


def test_places(tmp_path: Path) -> None:
    """Fault: "sudo" in a container, apt in a conda environment, Linux words on Windows."""
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").touch()
    found = read_distribution({}, root=tmp_path, system="linux", prefix=str(tmp_path), uid=0)
    assert (found.conda, found.container, found.root, found.manager) == (str(tmp_path), "podman", True, "")
    assert read_distribution({"KUBERNETES_SERVICE_HOST": "x"}, root=tmp_path, system="linux").container == "kubernetes"
    assert read_distribution({}, system="win32", prefix="x").id == "windows"


def test_the_table_of_packages_is_whole() -> None:
    """Fault: a tool that the builder reports as missing and the table does not know."""
    for row in PACKAGES.values():
        assert tuple(row) == MANAGERS and any(row.values())
    assert install_command(["c++", "ninja", "libaio"], Distribution("d", "", "apt", root=True)) == (
        "python -m pip install ninja && apt-get update && apt-get install -y g++ libaio-dev"
    )
    assert install_command(["nothing"], DEBIAN) == ""
    assert toolchain is not None
