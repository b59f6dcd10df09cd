"""Every architecture's source on the GPU that is here: machine code where it is this one's, else through its PTX.

``python ci/gpu_sources.py [NVRTC FOLDER...]`` (a step of ci/gpu_suite.py). For each NVRTC found (torch's own, and those
of the folders: ``pip install --target``), and each architecture up to this GPU's that ships or has cells, the GPU parts
of every op are built. A child that may compile nothing gets these and no others, runs ci/sanitizer_workload.py, and
has to show the bits of the machine code that the newest compiler made. Where a kernel counts steps on the device it
calls ``pow``, which differs between compiler releases by some ulps. The last line is JSON, a row per release, as the
report of ci/farm reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch

from op_builder.compile import build
from op_builder.driver import Driver
from op_builder.errors import UsageError
from op_builder.host import HostFacts, detect
from op_builder.matrix import dotted, load
from op_builder.plan import CompilePlan, package_version, plan_device, plan_host
from op_builder.settings import Settings
from op_builder.spec import all_specs
from op_builder.store import Store
from op_builder.targets import Target
from op_builder.toolchain import Nvrtc, discover_gpu, discover_host

SPECS = [spec for spec in all_specs().values() if spec.device]


def targets(here: tuple[int, int], compiler: Nvrtc) -> list[Target]:
    """What runs here of what the compiler makes: PTX of every architecture concerned, and machine code of this one."""
    wanted = [c for c, a in load().archs.items() if (a.ship or a.cell) and c <= here]
    found = [Target(*c, "ptx") for c in wanted] + [Target(*here)]
    return [t for t in found if compiler.targets(t) and t.runs_on(here)]


def host_parts(root: Path, settings: Settings, host: HostFacts) -> None:
    """Every op's host library."""
    tools = discover_host(settings, host)
    plans = tuple(plan_host(s, tools, settings, host, ROOT / "csrc", package_version(ROOT)) for s in SPECS if s.host)
    build(CompilePlan(plans), Store(root, "package"), settings, None, tools.ninja)


def results(parts: list[Path], folder: Path) -> dict[str, torch.Tensor]:
    """What the workload computes with these parts and no others.

    Raises:
        UsageError: it failed; ``why`` is the end of what it said.
    """
    out = folder / "results.pt"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "TORCH_"))}
    env |= {
        "DS_OPS_PATH": os.pathsep.join(map(str, parts)),
        "DS_JIT": "0",
        "TORCH_EXTENSIONS_DIR": str(folder / "empty"),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "sanitizer_workload.py"), str(out)], env=env, stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise UsageError("the workload failed", (done.stdout + done.stderr)[-1500:], "")
    found: dict[str, torch.Tensor] = torch.load(out)
    return found


def differences(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of results that differ by more than they may."""
    wrong = [] if set(got) == set(wanted) else ["names"]
    for name, tensor in wanted.items():
        other = got[name]
        if "capturable" in name and tensor.is_floating_point():
            eps = torch.finfo(tensor.dtype).eps
            same = torch.allclose(tensor.double(), other.double(), rtol=4 * eps, atol=16 * eps * 1e-3, equal_nan=True)
        else:
            same = torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        wrong += [] if same else [name]
    return wrong


def main(folders: list[str]) -> int:
    """Build, run, compare; 0 when all agree."""
    settings = Settings.read({k: v for k, v in os.environ.items() if not k.startswith(("DS_", "TORCH_CUDA_ARCH"))})
    host, here = detect(settings.env), Driver.open().device(0).capability
    compilers = {c.version[:2]: c for c in discover_gpu(settings, host, paths=[*folders, *sys.path]).nvrtc}
    driver = Driver.open().version
    ran, failed = [], 0
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(4) as pool:
        base = Path(work, "host")
        host_parts(base, settings, host)
        expected: dict[str, torch.Tensor] | None = None

        def one(target: Target, compiler: Nvrtc) -> dict[str, torch.Tensor]:
            folder = Path(work, f"{dotted(compiler.version[:2])}-{target.variant}")
            plans = tuple(plan_device(s, target, compiler, ROOT / "csrc", package_version(ROOT)) for s in SPECS)
            build(CompilePlan(plans), Store(folder / "parts", "package"), settings)
            return results([base, folder / "parts"], folder)

        for release, compiler in sorted(compilers.items(), reverse=True):
            if release > driver:
                continue
            good: dict[str, list[str]] = {"sass": [], "ptx": []}
            wanted = sorted(targets(here, compiler), key=lambda t: t.kind == "ptx")
            for target, found in zip(wanted, pool.map(lambda t, c=compiler: one(t, c), wanted), strict=True):
                expected = found if expected is None else expected
                wrong = differences(found, expected)
                failed += bool(wrong)
                verdict = f"{len(wrong)} of {len(expected)} differ: {wrong[:3]}" if wrong else f"{len(expected)} equal"
                print(f"NVRTC {dotted(release)} {target.variant} on {here}: {verdict}", flush=True)
                if not wrong:
                    good[target.kind].append(f"sm{target.capability[0]}{target.capability[1]}")
            ran.append({"release": dotted(release), **good})
    print(json.dumps(ran))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
