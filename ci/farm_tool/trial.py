"""``ci/farm test``: what an image promises, tried in hardened containers of it."""

from __future__ import annotations

from collections.abc import Callable

from op_builder.cells import Cell
from op_builder.errors import ImageFailed
from op_builder.matrix import load

from .engines import Answer, Engine
from .images import HARDENED

_STEP = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
p = torch.nn.Parameter(torch.ones(1000))
o = DeepSpeedCPUAdam([p], lr=0.1, weight_decay=0.0)
for _ in range(3):
    p.grad = torch.full_like(p, 2.0)
    o.step()
# Equal gradients: m/sqrt(v) is 1 up to eps, so each step moves by the learning rate.
assert torch.allclose(p, torch.full_like(p, 0.7), atol=1e-5), p[:4]
print("torch", torch.__version__, torch.version.cuda, "stepped to", round(p[0].item(), 6))
"""


def trials(cell: Cell, engine: Engine) -> dict[str, Callable[[], str]]:
    """Name -> what tries it and says what was seen; each raises :class:`ImageFailed` where the promise is broken."""
    image = cell.tags[0]

    def run(*words: str, env: tuple[str, ...] = ("-e", "DS_JIT=0")) -> Answer:
        return engine("run", *HARDENED, *env, image, *words)

    def good(answer: Answer, wanted: str) -> str:
        if answer.code or wanted not in answer.output:
            raise ImageFailed(f"{image}: expected {wanted!r}", f"exit code {answer.code}: {answer.output.strip()}", "")
        return next(line for line in answer.output.splitlines() if wanted in line)

    def described() -> str:
        found = engine.inspect(image)
        config = found["Config"]
        said, env = config["Labels"], dict(e.split("=", 1) for e in config["Env"])
        lacking = [k for k in ("ds.cell", "org.opencontainers.image.revision", "ds.conda-build") if not said.get(k)]
        lacking += [] if env.get("NVIDIA_DRIVER_CAPABILITIES") == "compute,utility" else ["NVIDIA_DRIVER_CAPABILITIES"]
        lacking += [] if env.get("NVIDIA_VISIBLE_DEVICES") == "all" else ["NVIDIA_VISIBLE_DEVICES"]
        lacking += [] if (found.get("Healthcheck") or config.get("Healthcheck")) else ["HEALTHCHECK"]
        lacking += (
            [] if config.get("User", "").partition(":")[0] not in ("", "0", "root") else ["a user that is not root"]
        )
        if lacking or said["ds.cell"] != cell.name:
            raise ImageFailed(f"{image} does not say {', '.join(lacking) or cell.name}", str(said), "")
        commit = said["org.opencontainers.image.revision"]
        return f"{said['ds.cell']}, conda build {said['ds.conda-build']}, commit {commit}"

    return {
        "describes itself": described,
        "greets": lambda: good(run("true"), f"deepspeed ops: {cell.name}"),
        "every op ready without compiling": lambda: good(run("true"), _all_ready(run("true").output)),
        "loads every op": lambda: good(run("python", "-m", "deepspeed_ops.container", "health"), "cpu_adam: ok"),
        "steps": lambda: good(run("python", "-c", _STEP), f"torch {load().torch_patch[cell.torch or '']}"),
        "is not root": lambda: good(run("id"), "uid=1000"),
        "keeps its hands off": lambda: good(run("sh", "-c", "touch /opt/ds/x 2>&1; true"), "Read-only file system"),
        "passes exit codes on": lambda: _code(run("sh", "-c", "exit 7"), 7, "ops ready"),
        "names a command it lacks": lambda: _code(run("no-such-command"), 127, "no-such-command: No such file"),
    }


def _all_ready(output: str) -> str:
    """The words of a greeting in which no op is missing: ``7 of 7 ops ready``."""
    line = next((text for text in output.splitlines() if text.endswith("ops ready")), "")
    count = line.split(" ", 1)[0]
    return f"{count} of {count} ops ready" if count.isdigit() else "N of N ops ready"


def _code(answer: Answer, wanted: int, words: str) -> str:
    if answer.code != wanted or words not in answer.output:
        raise ImageFailed(f"expected exit code {wanted}", f"exit code {answer.code}: {answer.output.strip()}", "")
    return f"exit code {wanted}"
