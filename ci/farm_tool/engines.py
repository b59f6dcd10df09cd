"""Docker or podman: which one is here, and what is wrong where none works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from op_builder.errors import EngineMissing, ImageFailed, OpsError, StoreError, UsageError

NAMES = ("docker", "podman")


@dataclass(frozen=True)
class Answer:
    """What an engine's command said."""

    code: int
    output: str


# Runs a command with an environment, tells each line to the first callable, returns everything. The second one is asked
# every second; where it answers, the command is ended and the answer is the output's last line.
Runner = Callable[[Sequence[str], Mapping[str, str], Callable[[str], None], Callable[[], str]], Answer]
_PATIENCE_S = 20  # of a command that was asked to end


def quiet(line: str) -> None:
    """Tell nobody."""


def never() -> str:
    """No reason to end."""
    return ""


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    tell: Callable[[str], None] = quiet,
    reason_to_end: Callable[[], str] = never,
) -> Answer:
    """Run a command to its end, both streams together."""
    reasons: list[str] = []
    over = threading.Event()

    def guard(started: subprocess.Popen[str]) -> None:
        while not over.wait(1):
            if reason := reason_to_end():
                reasons.append(reason)
                started.terminate()
                if not over.wait(_PATIENCE_S):
                    started.kill()
                return

    try:
        with subprocess.Popen(
            list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        ) as started:  # fmt: skip
            if reason_to_end is not never:
                threading.Thread(target=guard, args=(started,), daemon=True).start()
            lines = []
            assert started.stdout is not None
            for line in started.stdout:
                lines.append(line)
                tell(line.rstrip())
            code = started.wait()
    except OSError as exc:
        return Answer(127, str(exc))
    finally:
        over.set()
    return Answer(code, "".join([*lines, *reasons]))


def full_disk(folder: Path) -> Callable[[], str]:
    """A reason to end: the file system of ``folder`` has had no room for five questions."""
    asked = 0

    def reason() -> str:
        nonlocal asked
        found = os.statvfs(folder)
        asked = asked + 1 if found.f_bfree * found.f_frsize < 1 << 20 else 0
        return f"no space left on device: {folder} is full, and the build went on waiting" if asked >= 5 else ""

    return reason


@dataclass(frozen=True)
class Engine:
    """One engine that answers.

    Attributes:
        name: ``docker`` or ``podman``.
        env: environment of its client.
        options: what comes right after the command's name (podman's ``--root``).
        run: runs its commands.
    """

    name: str
    env: Mapping[str, str]
    options: tuple[str, ...] = ()
    run: Runner = field(default=run, compare=False)

    def __call__(
        self, *words: str, tell: Callable[[str], None] = quiet, reason_to_end: Callable[[], str] = never
    ) -> Answer:
        return self.run([self.name, *self.options, *words], self.env, tell, reason_to_end)

    def storage(self) -> Path | None:
        """The folder of the images, None where it is not on this machine."""
        if self.name == "docker" and not self.env.get("DOCKER_HOST", "unix://").startswith("unix://"):
            return None
        field_name = "{{.DockerRootDir}}" if self.name == "docker" else "{{.Store.GraphRoot}}"
        folder = Path(self.ask("info", "--format", field_name))
        return folder if folder.is_dir() else None

    def ask(self, *words: str) -> str:
        """The output of a command that has to succeed.

        Raises:
            ImageFailed: it did not.
        """
        answer = self(*words)
        if answer.code:
            raise failure(f"{self.name} {' '.join(words[:2])} failed", answer)
        return answer.output.rstrip("\n")

    def has(self, image: str) -> bool:
        """Whether an image is in the engine's own storage."""
        return self("image", "inspect", image).code == 0

    def inspect(self, image: str) -> dict[str, Any]:
        """An image's description."""
        found: dict[str, Any] = json.loads(self.ask("image", "inspect", image))[0]
        return found

    def layers(self, image: str) -> list[tuple[str, int]]:
        """(what made it, bytes) of every layer, the base first."""
        if self.name == "podman":  # whose template knows no plain numbers
            rows = json.loads(self.ask("history", "--no-trunc", "--format", "json", image))
            return [(str(row["CreatedBy"]), int(row["size"])) for row in reversed(rows)]
        text = self.ask("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", image)
        lines = [line.split("\t", 1) for line in text.splitlines() if "\t" in line]
        return [(made, int(float(size))) for size, made in reversed(lines)]


def find_engine(
    wanted: str | None, env: Mapping[str, str], runner: Runner = run, options: Sequence[str] = ()
) -> Engine:
    """The engine asked for, else the first of docker and podman that answers.

    Raises:
        EngineMissing: there is none, or its daemon is not running.
        UsageError: its name is unknown.
    """
    if wanted is not None and wanted not in NAMES:
        raise UsageError(f"engine {wanted!r} is not known", f"known: {', '.join(NAMES)}", "--engine docker")
    problems = []
    for name in (wanted,) if wanted else NAMES:
        if not shutil.which(name, path=env.get("PATH", "")):
            problems.append(f"{name} is not on PATH")
            continue
        # podman reads DOCKER_CONFIG too, and ends where the folder it names holds no file.
        mine = {k: v for k, v in env.items() if name == "docker" or k not in ("DOCKER_CONFIG", "DOCKER_HOST")}
        engine = Engine(name, mine, tuple(options) if name == wanted else (), runner)
        answer = engine("version", "--format", "{{.Server.Version}}" if name == "docker" else "{{.Client.Version}}")
        if answer.code:
            last = (answer.output.strip().splitlines() or ["no answer"])[-1]
            problems.append(f"{name} is here, and its daemon does not answer: {last}")
        elif name == "docker" and engine("buildx", "version").code:
            problems.append("docker is here without its plugin buildx")
        else:
            return engine
    daemon = any("daemon" in problem for problem in problems)
    fix = "systemctl start docker, or ci/farm engine start" if daemon else "apt-get install docker.io docker-buildx"
    what = "the daemon of the container engine does not run" if daemon else "no container engine was found"
    raise EngineMissing(what, "; ".join(problems), f"{fix}; parts need no engine: ci/farm build --parts-only")


def failure(what: str, answer: Answer) -> OpsError:
    """The error of a command that failed: a full disk is told from everything else."""
    lines = [line.strip() for line in answer.output.splitlines() if line.strip()]
    full = next((line for line in lines if "no space left on device" in line.lower()), "")
    if full:
        fix = "free space where the engine keeps its images (docker system df), or ci/farm prune"
        return StoreError(f"{what}: the disk is full", full, fix)
    signs = ("error:", "ERROR:", "exit code", "failed to", "no such", "this index gave", "Error:", "No module")
    first = next((line for line in lines if any(s in line for s in signs)), lines[-1] if lines else "(no output)")
    return ImageFailed(what, first, "")


def client_env(env: Mapping[str, str], own: Path) -> dict[str, str]:
    """The environment of a client: that of the farm's own engine where it runs and nothing else was said."""
    from .own_engine import OwnDocker

    docker = OwnDocker(own)
    if not env.get("DOCKER_HOST") and docker.socket.exists():
        return {**env, **{k: docker.env[k] for k in ("PATH", "DOCKER_HOST", "DOCKER_CONFIG")}}
    return {**env, "PATH": env.get("PATH", os.defpath)}
