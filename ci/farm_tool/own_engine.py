"""An engine of the farm's own, for a Debian host that has none: installed, started, stopped and cleaned up.

BuildKit with named contexts is needed and Debian's stable release may lack it, so dockerd comes from the packages of
the next one, unpacked beside the host; runc stays the host's. Everything lies in one folder and goes with it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from op_builder.errors import CompilerMissing, OpsError, UsageError

# The Debian release whose docker.io has BuildKit with named contexts and buildx.
NEWER = "trixie"
UNPACKED = ("docker.io", "docker-cli", "containerd", "docker-buildx")
# Command -> Debian package of the host's own release.
HOST_TOOLS = {"mmdebstrap": "mmdebstrap", "runc": "runc", "iptables": "iptables"}
PODMAN_TOOLS = {"podman": "podman", "buildah": "buildah", "runc": "runc", "netavark": "netavark"}
_START_S = 60.0


def run(argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600) -> str:
    """Run a command of the set-up; its output.

    Raises:
        OpsError: it failed.
    """
    done = subprocess.run(
        list(argv), env=None if env is None else dict(env), stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", errors="replace", timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise OpsError(f"{' '.join(argv[:4])} failed", f"exit code {done.returncode}: {'; '.join(said)}", "")
    return done.stdout


def install(tools: Mapping[str, str]) -> None:
    """Install Debian packages of commands that are missing.

    Raises:
        CompilerMissing: this user cannot.
    """
    where = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/lib/podman"
    missing = sorted({package for command, package in tools.items() if not shutil.which(command, path=where)})
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise CompilerMissing(f"{', '.join(missing)} are missing", "only root on Debian installs them", "sudo apt-get")
    wait = ["-o", "DPkg::Lock::Timeout=600"]
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", *wait, "update", "-qq"], quiet)
    run(["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *missing], quiet)


@dataclass(frozen=True)
class DebianMirror:
    """Where the host's own Debian packages come from."""

    uri: str
    codename: str


def mirror() -> DebianMirror:
    """The mirror of this host's main archive.

    Raises:
        UsageError: this host is no Debian.
    """
    listed = run(["apt-get", "indextargets", "--format", "$(REPO_URI)|$(CODENAME)|$(LABEL)", "Created-By: Packages"])
    for line in listed.splitlines():
        uri, codename, label = line.split("|")
        if label == "Debian" and re.fullmatch(r"[a-z]+", codename):
            return DebianMirror(uri, codename)
    raise UsageError("apt names no Debian archive", "an engine of the farm's own comes from there", "install Docker")


@dataclass(frozen=True)
class OwnDocker:
    """dockerd in a folder.

    Args:
        folder: gets programs, data and socket; its path must be short.
    """

    folder: Path

    @property
    def socket(self) -> Path:
        """What it listens on."""
        return self.folder / "docker.sock"

    @property
    def env(self) -> dict[str, str]:
        """Environment of a client."""
        programs = self.folder / "usr"
        path = f"{programs / 'bin'}:{programs / 'sbin'}:/usr/local/sbin:/usr/sbin:/sbin:{os.environ.get('PATH', '')}"
        config = str(self.folder / "config")
        return {**os.environ, "PATH": path, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONFIG": config}

    def start(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Install if need be, start, wait until it answers.

        Raises:
            OpsError: it did not come up; ``why`` ends with its log.
        """
        if len(str(self.socket)) > 100:
            raise UsageError(
                f"{self.folder} is too long", "a socket's path has at most 108 characters", "a shorter one"
            )
        install(HOST_TOOLS)
        self.stop()
        if not (self.folder / "usr" / "sbin" / "dockerd").exists():
            say("installing dockerd")
            self._unpack()
        plugins = self.folder / "config" / "cli-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.folder / "usr/libexec/docker/cli-plugins/docker-buildx", plugins / "docker-buildx")
        log = self.folder / "dockerd.log"
        data, execution = self.folder / "data", self.folder / "exec"
        with log.open("w", encoding="utf-8") as stream:
            started = subprocess.Popen(
                ["dockerd", "--data-root", str(data), "--exec-root", str(execution), "--config-file", os.devnull,
                 "--pidfile", str(self.folder / "dockerd.pid"), "-H", f"unix://{self.socket}"],
                env=self.env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
            )  # fmt: skip
        for _ in range(int(_START_S * 2)):
            if self.answers():
                return
            if started.poll() is not None:
                break
            time.sleep(0.5)
        tail = "; ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
        self.stop()
        raise OpsError("dockerd did not come up", tail, f"read {log}")

    def answers(self) -> bool:
        """Whether the daemon answers."""
        try:
            run(["docker", "version"], self.env, 20)
        except (OpsError, OSError, subprocess.TimeoutExpired):
            return False
        return True

    def stop(self) -> None:
        """End the daemon by its pid and unmount what it leaves mounted."""
        pid = self.folder / "dockerd.pid"
        if pid.exists():
            number = int(pid.read_text(encoding="utf-8"))
            if self._is_ours(number):
                os.kill(number, signal.SIGTERM)
                for _ in range(80):
                    if not self._is_ours(number):
                        break
                    time.sleep(0.25)
                else:
                    os.kill(number, signal.SIGKILL)
            pid.unlink(missing_ok=True)
        for mount in sorted(self._mounts(), key=len, reverse=True):
            subprocess.run(["umount", "-l", mount], stdin=subprocess.DEVNULL, capture_output=True, check=False)

    def remove(self) -> None:
        """Stop it and delete the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ours(self, pid: int) -> bool:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return "dockerd" in line and str(self.folder) in line

    def _mounts(self) -> list[str]:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        return [m for m in (line.split()[1] for line in lines) if m.startswith(f"{self.folder}/")]

    def _unpack(self) -> None:
        """Packages of the newer release, by an apt whose folders are private, so that the host's stays as it is."""
        source = mirror()
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as text:
            work = Path(text)
            for name in ("lists/partial", "cache/archives/partial", "debs"):
                (work / name).mkdir(parents=True)
            (work / "sources.list").write_text(f"deb {source.uri} {NEWER} main\n", encoding="utf-8")
            options = {
                "Dir::Etc::sourcelist": f"{work}/sources.list", "Dir::Etc::sourceparts": os.devnull,
                "Dir::State::lists": f"{work}/lists", "Dir::Cache": f"{work}/cache", "APT::Sandbox::User": "root",
            }  # fmt: skip
            (work / "apt.conf").write_text("".join(f'{k} "{v}";\n' for k, v in options.items()), encoding="utf-8")
            env = {**os.environ, "APT_CONFIG": f"{work}/apt.conf"}
            run(["apt-get", "update", "-qq"], env)
            for package in UNPACKED:
                run(["sh", "-c", f"cd {work}/debs && apt-get download -qq {package}/{NEWER}"], env)
            for deb in sorted((work / "debs").glob("*.deb")):
                run(["dpkg-deb", "-x", str(deb), str(self.folder)])


@dataclass(frozen=True)
class OwnPodman:
    """podman with its storage in a folder, set up so that it works as root inside a container or a small machine."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Environment of the command."""
        conf = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
        path = f"/usr/local/sbin:/usr/sbin:/sbin:{os.environ.get('PATH', '')}"
        return {**os.environ, "PATH": path, **{k: str(self.folder / v) for k, v in conf.items()}}

    def start(self) -> None:
        """Install podman if need be and write its settings: there is no daemon."""
        install(PODMAN_TOOLS)
        self.folder.mkdir(parents=True, exist_ok=True)
        containers = [
            "[containers]",
            'default_ulimits = ["nofile=16384:16384", "nproc=32768:32768"]',
            "[engine]",
            'runtime = "runc"',
            'cgroup_manager = "cgroupfs"',
            'events_logger = "file"',
        ]
        storage = [
            "[storage]",
            'driver = "overlay"',
            f'graphroot = "{self.folder / "data"}"',
            f'runroot = "{self.folder / "run"}"',
        ]
        (self.folder / "containers.conf").write_text("\n".join(containers) + "\n", encoding="utf-8")
        (self.folder / "storage.conf").write_text("\n".join(storage) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Delete every image and the folder."""
        if (self.folder / "storage.conf").exists() and shutil.which("podman"):
            command = ["podman", "system", "reset", "--force"]
            subprocess.run(command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def make_base(tarball: Path, codename: str | None = None) -> Path:
    """A minimal Debian as a tar file, by mmdebstrap; kept where it is there already.

    Args:
        tarball: where it goes.
        codename: of the release; default: this host's.
    """
    if not tarball.is_file():
        install(HOST_TOOLS)
        source = mirror()
        tarball.parent.mkdir(parents=True, exist_ok=True)
        fresh = tarball.with_name(f".{os.getpid()}-{tarball.name}")
        try:
            slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")]
            run(
                [
                    "mmdebstrap",
                    "--quiet",
                    "--variant=minbase",
                    *slim,
                    codename or source.codename,
                    str(fresh),
                    source.uri,
                ]
            )
            fresh.rename(tarball)
        finally:
            fresh.unlink(missing_ok=True)
    return tarball
