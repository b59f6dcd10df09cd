"""Three hosts on one machine: each a network and a mount namespace with an sshd, a home, a disk and a Python.

Runs inside `unshare --net --pid --mount` (see the Makefile), so that killing that one process takes the hosts, their
network, their mounts and their disks along. What is real: sshd, pdsh, pdcp, pip, venvs, file systems that are full.
What is played: the GPU driver's version (a file below /proc/driver) and slow hosts (their login command sleeps; the
kernel this was written on has no netem).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

NODES = ("node1", "node2", "node3")
DRIVERS = {"node1": "550.54.15", "node2": "550.54.15", "node3": "535.104.05"}
_NET = "10.231.7"
# The same path on every host, and another folder behind it on each.
HERE = "mine ü"


def run(*argv: str | Path, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command; its whole output stands in the failure."""
    done = subprocess.run(
        [str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace", timeout=timeout, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{argv} gave {done.returncode}:\n{done.stdout}"
    return done


def net_of(pid: int) -> str:
    """The network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


@dataclass
class Node:
    """One host."""

    name: str
    address: str
    root: Path
    pid: int = 0

    def inside(self, *argv: str | Path, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on this host, past its network."""
        return run("nsenter", "-t", str(self.pid), "-m", "-n", *argv, check=check, timeout=timeout)


class Lab:
    """The hosts and the side that installs on them.

    Args:
        root: an empty folder, which vanishes with the namespaces.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.here = root, root / HERE
        self.config = root / "ssh_config"
        self.nodes = {
            name: Node(name, f"{_NET}.{number}", root / f"disk of {name}") for number, name in enumerate(NODES, 1)
        }
        self.python = self.here / "venv" / "bin" / "python"

    def __enter__(self) -> Lab:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "addr", "add", f"{_NET}.254/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        self.here.mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.root / "key")
        hosts = "".join(f"Host {n.name}\n  HostName {n.address}\n" for n in self.nodes.values())
        options = f"Host *\n  User root\n  IdentityFile {self.root}/key\n  StrictHostKeyChecking no\n"
        self.config.write_text(f"{hosts}{options}  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n", encoding="utf-8")
        for node in self.nodes.values():
            self._disk(node)
            self.start(node.name)
        return self

    def __exit__(self, *exc: object) -> None:
        for name in NODES:
            self.stop(name)

    # --- hosts ---

    def _disk(self, node: Node) -> None:
        """Home, Python and /tmp of a host."""
        home = node.root / "home of root"
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        shutil.copyfile(self.root / "key.pub", home / ".ssh" / "authorized_keys")
        for name in ("tmp", "driver/nvidia"):
            (node.root / name).mkdir(parents=True)
        told = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVERS[node.name]}  Thu Jan  1 00:00:00 UTC 1970\n"
        (node.root / "driver/nvidia/version").write_text(told, encoding="utf-8")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", node.root / "host_key")
        run(sys.executable, "-m", "venv", "--without-pip", node.root / "venv", timeout=120)
        site = next((node.root / "venv" / "lib").glob("python3*")) / "site-packages"
        # Torch is half a gigabyte: borrowed from the environment that runs this. Its .pth files are not followed.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        (node.root / "delay").write_text("0\n", encoding="utf-8")
        passwd = f"root:x:0:0:root:{self.here}/home of root:/bin/bash\nsshd:x:100:65534::/run/sshd:/bin/false\n"
        (node.root / "passwd").write_text(passwd, encoding="utf-8")
        login = node.root / "login"
        login.write_text(
            f'#!/bin/bash\nsleep "$(cat "{self.here}/delay")"\nexec bash -c "$SSH_ORIGINAL_COMMAND"\n', "utf-8"
        )
        login.chmod(0o755)
        (node.root / "sshd_config").write_text(
            f'ListenAddress {node.address}\nHostKey "{node.root}/host_key"\nUsePAM no\nStrictModes no\nPidFile none\n'
            f'ForceCommand "{self.here}/login"\nPermitUserEnvironment yes\nPermitRootLogin yes\nMaxStartups 100\n',
            encoding="utf-8",
        )
        self.environment(node.name, TMPDIR="/tmp")

    def environment(self, name: str, **variables: str) -> None:
        """What logins of a host find in their environment."""
        lines = "".join(f"{k}={v}\n" for k, v in variables.items())
        (self.nodes[name].root / "home of root" / ".ssh" / "environment").write_text(lines, encoding="utf-8")

    def start(self, name: str) -> None:
        """Switch a host on."""
        node = self.nodes[name]
        setup = (
            'set -e; cd "$1"; mount --make-rprivate /; mount --bind "$1" "$2"; mount --bind "$1/tmp" /tmp\n'
            'mount --bind "$1/passwd" /etc/passwd; mount --bind "$1/driver" /proc/driver; mkdir -p /run/sshd\n'
            'hostname "$3"; while ! ip addr show dev eth0 2>/dev/null | grep -q "inet "; do sleep 0.05; done\n'
            'exec /usr/sbin/sshd -D -e -f "$1/sshd_config"'
        )
        argv = ["unshare", "-m", "-n", "-u", "bash", "-c", setup, "node", str(node.root), str(self.here), name]
        log = (node.root / "sshd.log").open("ab")
        started = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        node.pid = started.pid
        while net_of(node.pid) == net_of(os.getpid()):
            time.sleep(0.01)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
        run("ip", "link", "set", name, "master", "br0", "up")
        for words in (("link", "set", "lo", "up"), ("link", "set", "eth0", "up")):
            run("nsenter", "-t", str(node.pid), "-n", "ip", *words)
        run("nsenter", "-t", str(node.pid), "-n", "ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
        self.wait_for(name)

    def wait_for(self, name: str) -> None:
        """Until a host's sshd answers."""
        for _ in range(40):
            done = run("ssh", "-F", self.config, "-o", "ConnectTimeout=1", name, "true", check=False)
            if done.returncode == 0:
                return
            if not Path(f"/proc/{self.nodes[name].pid}/ns/net").exists():
                break
            time.sleep(0.05)
        log = (self.nodes[name].root / "sshd.log").read_text(encoding="utf-8")
        raise AssertionError(f"{name} does not come up: {done.stdout}\n{log}")

    def stop(self, name: str, *, silent: bool = False) -> None:
        """Every process of a host dies at once. ``silent``: its plug was pulled, so no packet tells of that."""
        node = self.nodes[name]
        if not node.pid:
            return
        mine = net_of(node.pid)
        if silent:
            run("ip", "link", "set", name, "down", check=False)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if net_of(int(entry.name)) == mine:
                        os.kill(int(entry.name), signal.SIGKILL)
                except OSError:
                    continue
        os.waitpid(node.pid, 0)
        run("ip", "link", "del", name, check=False)
        node.pid = 0

    def slow(self, name: str, seconds: float) -> None:
        """Every login of a host takes so much longer."""
        (self.nodes[name].root / "delay").write_text(f"{seconds}\n", encoding="utf-8")

    def site(self, name: str) -> Path:
        """site-packages of a host, as this side sees it."""
        return next((self.nodes[name].root / "venv" / "lib").glob("python3*")) / "site-packages"

    def torch(self, real: bool) -> None:
        """Whether the hosts import the borrowed torch or a stand-in with a version: its import costs seconds a host."""
        for name in NODES:
            folder = self.site(name) / "torch"
            shutil.rmtree(folder, ignore_errors=True)
            if not real:
                folder.mkdir()
                text = "import types\n__version__ = '2.13.0'\nversion = types.SimpleNamespace(cuda=None, hip=None)\n"
                (folder / "__init__.py").write_text(text, encoding="utf-8")

    def forget(self, *names: str) -> None:
        """Take the distribution away from hosts, so that they have something to do."""
        for name in names:
            for path in (*self.site(name).glob("deepspeed"), *self.site(name).glob("deepspeed[_-]*")):
                shutil.rmtree(path)

    # --- the side that installs ---

    def hostfile(self, *names: str, folder: str = ".") -> Path:
        """A hostfile of these hosts."""
        path = self.root / folder / "hostfile"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# made by a test\n\n" + "".join(f"{name} slots=8\n" for name in names), encoding="utf-8")
        return path

    def install(
        self, wheel: Path, *options: str | Path, path: str | None = None, wait: bool = True
    ) -> subprocess.Popen[str]:
        """``install.sh`` of this checkout; finished if ``wait``."""
        checkout = Path(__file__).resolve().parents[2]
        argv = [checkout / "install.sh", "-r", "--wheel", wheel, "--python", self.python]
        argv += ["--ssh_args", f"-F {self.config}", *options]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "PYTHONPATH", "SLURM_"))}
        env |= {"PYTHON": sys.executable, "PATH": path or env["PATH"]}
        running = subprocess.Popen(
            [str(a) for a in argv], env=env, cwd=self.root, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if wait:
            self.finish(running)
        return running

    def finish(self, running: subprocess.Popen[str]) -> None:
        """Wait for an installation; its output is then ``running.said`` and ``running.told``."""
        running.said, running.told = running.communicate(timeout=180)  # type: ignore[attr-defined]
        sys.stdout.write(f"{running.said}\n{running.told}\n")  # type: ignore[attr-defined]
