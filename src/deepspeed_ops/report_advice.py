"""What to do about what the report found: a problem, why, and the exact commands for this machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed_ops.op_builder import matrix
from deepspeed_ops.op_builder.distribution import Distribution
from deepspeed_ops.op_builder.host import HostFacts
from deepspeed_ops.op_builder.matrix import dotted
from deepspeed_ops.op_builder.packages import install_command

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.toolchain import Toolchain
    from deepspeed_ops.report_data import OpLine, TorchFacts

_DRIVER_FLOOR = 525  # the oldest driver that loads GPU parts (cuLibrary*)
_TORCH_INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True)
class Advice:
    """One thing to do.

    Attributes:
        problem: what is wrong, in a line.
        why: what was found.
        commands: to paste, in this order; empty where nothing here can be done.
    """

    problem: str
    why: str
    commands: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What advice is drawn from.

    Attributes:
        host: the machine.
        at: where commands are pasted.
        torch: what importing it told.
        tools: compilers; None where nobody could look.
        ops: the lines of the report.
        shm_small: whether ``/dev/shm`` is too small for data loaders.
        env: environment variables.
        prefix: Python's ``sys.prefix``.
        owners: distributions that hold the import name ``deepspeed``.
    """

    host: HostFacts
    at: Distribution
    torch: TorchFacts
    tools: Toolchain | None
    ops: Sequence[OpLine]
    shm_small: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    owners: Sequence[str] = ()


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Everything there is to do, most important first, each command once."""
    found: list[Advice] = []
    seen: set[tuple[str, ...]] = set()
    for source in (_environment, _torch, _driver, _gpu, _tools, _needs, _shared_memory, _rest):
        for advice in source(facts):
            if not advice.commands or advice.commands not in seen:
                found.append(advice)
                seen.add(advice.commands)
    return tuple(found)


# --- Python and torch ---------------------------------------------------------------------------------------------


def _environment(facts: Facts) -> Iterator[Advice]:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = facts.env.get(variable, "")
        if active and facts.prefix and active.rstrip("/\\") != facts.prefix.rstrip("/\\"):
            if variable == "CONDA_PREFIX" and (
                facts.env.get("VIRTUAL_ENV") or facts.env.get("CONDA_DEFAULT_ENV") == "base"
            ):
                continue  # a venv made inside a conda environment is the one that counts; base is always there
            why = (
                f"{variable}={active}, and this report ran in {facts.prefix}: each has its own torch and its own parts"
            )
            yield Advice("this is not the active environment", why, ("python -m deepspeed.env_report",))
    if len(facts.owners) > 1:
        why = (
            f"{', '.join(facts.owners)} both hold the import name deepspeed, and the files of one overwrote the other's"
        )
        command = f"{facts.at.python} -m pip uninstall -y {' '.join(facts.owners)}"
        again = f"{facts.at.python} -m pip install {facts.owners[0]}"
        yield Advice("two distributions own the name deepspeed", why, (command, again))


def _torch(facts: Facts) -> Iterator[Advice]:
    torch, at = facts.torch, facts.at
    if torch.version is None:
        absent = torch.problem == "not installed"
        what = "torch is missing" if absent else "torch does not import"
        why = "the ops run on torch's tensors; building them needs no torch" if absent else torch.problem
        yield Advice(what, why, (_torch_command(facts, again=not absent),))
    elif torch.hip:
        why = f"torch {torch.version} is built for ROCm {torch.hip}; GPU code here is for NVIDIA GPUs, the CPU ops work"
        yield Advice("no GPU op works with a ROCm torch", why)
    elif torch.cuda is None and facts.host.devices:
        why = f"torch {torch.version} is a CPU build, and this machine has {facts.host.devices[0].name}"
        yield Advice("torch does not use the GPU", why, (_torch_command(facts, again=True),))
    if at.id == "windows" and torch.version is None and facts.host.machine not in ("x86_64", ""):
        yield Advice("torch has no wheel here", f"{facts.host.platform}: no torch wheel for this machine", ())


def _torch_command(facts: Facts, again: bool) -> str:
    if facts.at.conda:
        return "conda install -y -c conda-forge pytorch"
    pip = f"{facts.at.python} -m pip install {'--force-reinstall ' if again else ''}torch"
    driver = facts.host.driver
    if driver is None:
        # The index' own wheels for Linux bring 3 GB of CUDA libraries that nothing here uses.
        return f"{pip} --index-url {_TORCH_INDEX}/cpu" if facts.host.platform == "linux-x86_64" else pip
    if driver.cuda is None:
        return pip
    releases = matrix.load().cuda
    fitting = [r for r, row in releases.items() if row.torch and r[0] <= driver.cuda[0]]
    if not fitting or max(fitting)[0] == max(releases)[0]:
        return pip  # the index' own wheels serve the newest major
    best = max(fitting, key=lambda r: (max(matrix.parse_version(t) for t in releases[r].torch), r))
    return f"{pip} --index-url {_TORCH_INDEX}/cu{''.join(map(str, best))}"


# --- driver and GPU -----------------------------------------------------------------------------------------------


def _driver(facts: Facts) -> Iterator[Advice]:
    driver = facts.host.driver
    if driver is None:
        return
    old = (driver.cuda is not None and driver.cuda < (12, 0)) or (driver.branch and driver.branch[0] < _DRIVER_FLOOR)
    if old:
        serves = f" (CUDA {dotted(driver.cuda)})" if driver.cuda else ""
        why = f"driver {driver.version}{serves}; GPU parts need {_DRIVER_FLOOR} or newer"
        yield Advice("the NVIDIA driver is too old", why, driver_commands(facts.host, facts.at))


def driver_commands(host: HostFacts, at: Distribution) -> tuple[str, ...]:
    """How a newer NVIDIA driver is installed where this is."""
    if host.wsl:
        return ("wsl --update", "# on Windows, not in WSL: install NVIDIA's driver for Windows, 527 or newer")
    if at.id == "windows":
        return ("# install NVIDIA's driver for Windows, 527 or newer; nvcuda.dll comes with it",)
    if at.container:
        return ("# on the host, not in the container: its driver is mounted into the container",)
    sudo = "" if at.root else "sudo "
    known = {
        "ubuntu": f"{sudo}ubuntu-drivers install",
        "debian": f"{sudo}apt-get install -y nvidia-driver",
        "fedora": f"{sudo}dnf install -y akmod-nvidia",
    }
    by_manager = {
        "apt": known["debian"],
        "dnf": f"{sudo}dnf module install -y nvidia-driver:open-dkms",
        "zypper": f"{sudo}zypper install -y nvidia-open-driver-G06-signed-kmp-default",
        "pacman": f"{sudo}pacman -S --noconfirm nvidia-open",
    }
    command = known.get(at.id) or by_manager.get(at.manager, "# install NVIDIA driver 525 or newer")
    return (command, f"{sudo}reboot")


def _gpu(facts: Facts) -> Iterator[Advice]:
    told = "; ".join(facts.host.notes)
    if facts.host.devices or not facts.host.notes:
        return
    if "driver capability `utility`" in told:
        run = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE"
        if facts.at.container == "podman":
            run = "podman run --device nvidia.com/gpu=all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE"
        if facts.at.container == "kubernetes":
            run = "kubectl set env deployment/NAME NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield Advice("the container hides the driver's management library", told, (run,))
    elif facts.host.wsl:
        yield Advice("no GPU is visible under WSL", told, ("wsl --update", "wsl --shutdown"))
    elif "reboot" in told:
        yield Advice("driver and kernel module differ", told, ("reboot" if facts.at.root else "sudo reboot",))


# --- tools and libraries ------------------------------------------------------------------------------------------


def _tools(facts: Facts) -> Iterator[Advice]:
    tools = facts.tools
    if tools is None:
        return
    problems = {p.what: p for p in tools.problems}
    if tools.ffi is None:
        problem = next((p for what, p in problems.items() if "tvm" in what), None)
        command = install_command(["tvm-ffi"], facts.at)
        if problem is not None and facts.host.libc == "musl":
            command = problem.fix
        yield Advice("apache-tvm-ffi is missing", problem.why if problem else "no op loads without it", (command,))
    if not any(way.what == "host library" and way.action == "fail" for line in facts.ops for way in line.ways):
        return  # every host library lies ready: nobody needs a compiler
    if tools.host is None:
        problem = next(
            (p for what, p in problems.items() if "compiler" in what or "Visual" in what or "SDK" in what), None
        )
        problem = problem or next(iter(problems.values()), None)
        command = install_command(["c++"], facts.at) or (problem.fix if problem else "")
        why = f"{problem.what}: {problem.why}" if problem else "PATH has none"
        yield Advice("no C++ compiler, and an op has no ready host library", why, _in_image(command, facts.at))
    if tools.ninja is None:
        yield Advice(
            "ninja is missing", "host libraries are compiled through it", (install_command(["ninja"], facts.at),)
        )


def _in_image(command: str, at: Distribution) -> tuple[str, ...]:
    """In a container what is installed now is gone with it: the line for the image, too."""
    if not command:
        return ()
    if at.container and at.manager and not at.conda:
        return (command, f"# in the Dockerfile, to keep it: RUN {command}")
    return (command,)


def _needs(facts: Facts) -> Iterator[Advice]:
    missing: dict[str, list[str]] = {}
    whys: dict[str, tuple[str, str]] = {}
    for line in facts.ops:
        for way in line.ways:
            for reason in way.why_not:
                match = re.search(r": needs: ([^:]+): (.*)", reason, re.DOTALL)
                if match:
                    missing.setdefault(match[1], []).append(line.op)
                    whys[match[1]] = (match[2], way.fix)
    for need, ops in missing.items():
        command = install_command([need], facts.at) or whys[need][1]
        problem = f"{', '.join(dict.fromkeys(ops))} needs {need}"
        yield Advice(problem, whys[need][0], _in_image(command, facts.at))


def _shared_memory(facts: Facts) -> Iterator[Advice]:
    if not facts.shm_small:
        return
    sudo = "" if facts.at.root else "sudo "
    command = {
        "": f"{sudo}mount -o remount,size=8g /dev/shm",
        "kubernetes": "# in the pod: an emptyDir volume of medium Memory at /dev/shm",
    }.get(facts.at.container, f"{facts.at.container} run --shm-size=8g IMAGE")
    yield Advice("/dev/shm is small", "data loaders and NCCL die with bus errors below 512 MB", (command,))


def _rest(facts: Facts) -> Iterator[Advice]:
    """What the resolver advises for a half of an op that nothing above explains."""
    tools = facts.tools
    explained = tools is None or tools.host is None or tools.ninja is None or tools.ffi is None
    for line in facts.ops:
        for way in line.ways:
            needs = any(": needs: " in reason for reason in way.why_not)
            known = needs or (way.what == "host library" and explained) or "driver" in way.fix
            if way.action == "fail" and way.fix and not known:
                yield Advice(f"{line.op} cannot work for {way.what}", way.how, (way.fix,))
