"""Facts of the machine, from text a test writes: nothing here needs the machine to be of that kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_builder import host
from op_builder.host import (
    HostFacts,
    c_library,
    detect,
    filesystem_of,
    filesystem_type,
    is_network_filesystem,
    is_wsl,
    parse_cpuinfo,
    sysctl_features,
    windows_features,
)


class NoNvml:
    """An NVML that is not there."""

    def nvmlInit(self) -> None:
        raise OSError("NVML Shared Library Not Found")


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


def test_this_machine() -> None:
    """Fault: looking at the machine raises, or names its platform otherwise than the matrix does."""
    facts = detect(os.environ)
    assert facts.platform == f"{facts.system}-{facts.machine}"
    if facts.system == "linux":
        assert facts.libc in ("glibc", "musl")


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("linux", "x86_64", "linux-x86_64"),
        ("linux", "aarch64", "linux-aarch64"),
        ("win32", "AMD64", "windows-x86_64"),
        ("darwin", "arm64", "macos-aarch64"),
        ("linux", "riscv64", "linux-riscv64"),
        ("freebsd14", "amd64", "freebsd14-x86_64"),
    ],
)
def test_platform_names(tmp_path: Path, system: str, machine: str, expected: str) -> None:
    """Fault: AMD64 and x86_64, arm64 and aarch64 count as different platforms."""
    assert detect({}, root=tmp_path, system=system, machine=machine, nvml=NoNvml()).platform == expected


def test_an_empty_machine_is_notes_not_an_exception(tmp_path: Path) -> None:
    """Fault: a container without /proc ends the import."""
    facts = detect({}, root=tmp_path, system="linux", machine="x86_64", nvml=NoNvml())
    assert facts.cpu_features == frozenset() and facts.driver is None and facts.devices == ()
    assert any("cpuinfo" in n for n in facts.notes) and any("NVML" in n for n in facts.notes)


def test_unreadable_files_are_notes(tmp_path: Path) -> None:
    """Fault: a folder where a file is expected, or bytes that are no UTF-8, raise."""
    (tmp_path / "proc/cpuinfo").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_bytes(b"\xff\xfe6.1\n")
    facts = detect({}, root=tmp_path, system="linux", machine="x86_64", nvml=NoNvml())
    assert facts.cpu_features == frozenset() and not facts.wsl


def test_detect_starts_no_process_and_writes_nothing() -> None:
    """Fault: an import that runs lscpu, df or nvidia-smi (12-21 s in DeepSpeed), or prints."""
    code = (
        "import os, sys, subprocess\n"
        "def no(*a, **k): raise AssertionError('a process was started')\n"
        "subprocess.Popen.__init__ = no; os.system = no; os.fork = no\n"
        "from op_builder import host\n"
        "before = dict(os.environ)\n"
        "host.detect(os.environ)\n"
        "assert dict(os.environ) == before\n"
        "assert 'torch' not in sys.modules and 'tvm_ffi' not in sys.modules\n"
    )
    root = Path(host.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- CPU ----------------------------------------------------------------------------------------------------------

HASWELL = "processor : 0\nflags\t\t: fpu sse4_2 avx avx2 fma f16c bmi2\n\nflags\t\t: fpu sse4_2 avx avx2 fma f16c\n"


def test_cpu_features_are_those_every_core_has() -> None:
    """Fault: code for the big core runs on the small one (SIGILL)."""
    assert parse_cpuinfo(HASWELL) == {"sse4_2", "avx", "avx2", "fma", "f16c"}
    mixed = "flags : avx avx2 avx512f avx512bw\n\nflags : avx avx2\n"
    assert parse_cpuinfo(mixed) == {"avx", "avx2"}


def test_cpu_features_of_other_cpus() -> None:
    """Fault: Nehalem taken for AVX, Arm's asimd not recognised, an unknown file crashes."""
    assert parse_cpuinfo("flags : fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt\n") == {"sse4_2"}
    assert parse_cpuinfo("Features\t: fp asimd evtstrm aes sve\nCPU implementer : 0x41\n") == {"neon", "sve"}
    assert parse_cpuinfo("isa : rv64imafdc\n") == frozenset() == parse_cpuinfo("")
    full = "flags : avx avx2 fma f16c avx512f avx512bw avx512vl avx512dq"
    assert parse_cpuinfo(full) >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@given(st.text(max_size=80))
def test_any_cpuinfo_is_read(text: str) -> None:
    """Fault: an odd /proc/cpuinfo raises."""
    assert isinstance(parse_cpuinfo(text), frozenset)


def test_features_of_macos_and_windows() -> None:
    """Fault: 0 and absent read as present."""
    values = {"hw.optional.avx2_0": 1, "hw.optional.fma": 1, "hw.optional.avx512f": 0}
    assert sysctl_features(values.get) == {"avx2", "fma"}
    assert windows_features(lambda number: number in (39, 40)) == {"avx", "avx2", "fma", "f16c"}
    assert windows_features(lambda number: False) == frozenset()


# --- system -------------------------------------------------------------------------------------------------------


def test_wsl(tmp_path: Path) -> None:
    """Fault: WSL taken for plain Linux, so that advice and library paths are wrong."""
    assert not is_wsl(tmp_path)
    write(tmp_path, "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    assert is_wsl(tmp_path)


def test_c_library_of_this_process() -> None:
    """Fault: the glibc floor compared with a string, or with the compiler's instead of the process's."""
    name, version = c_library()
    if sys.platform == "linux" and name == "glibc":
        assert version >= (2, 17) and HostFacts("linux", "x86_64", name, version).glibc == version
    assert HostFacts("linux", "x86_64", "musl").glibc is None


def test_musl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: Alpine taken for a glibc system, where glibc parts end in "symbol not found"."""
    write(tmp_path, "lib/ld-musl-x86_64.so.1")
    monkeypatch.setattr(os, "confstr", lambda name: (_ for _ in ()).throw(ValueError(name)), raising=False)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: object())
    assert c_library(tmp_path) == ("musl", ())


# --- file systems (DeepSpeed#8249, #7642, #6473) -------------------------------------------------------------------

MOUNTS = r"""22 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/a
25 22 0:23 / /proc rw,nosuid - proc proc rw
31 22 0:42 / /home rw - ext4 /dev/sda1 rw
40 31 0:50 / /home/ann rw,relatime shared:9 master:1 - nfs4 server.example:/export rw,vers=4.2
41 31 0:51 / /home/old\040disk rw - xfs /dev/sdb rw
50 22 0:60 / /auto rw - autofs systemd-1 rw,fd=30
51 50 0:61 / /auto rw - nfs4 server:/auto rw
60 22 0:70 / /scratch-nfs rw - ext4 /dev/nfs_disk rw
broken line
61 22 0:71 / /nowhere rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ann/.cache/torch_extensions", "nfs4"),
        ("/home/ann", "nfs4"),
        ("/home/anna", "ext4"),
        ("/home/old disk/x", "xfs"),
        ("/auto/project", "nfs4"),
        ("/scratch-nfs/x", "ext4"),
        ("/tmp/not/yet/there", "overlay"),
        ("/proc/self", "proc"),
        ("/", "overlay"),
    ],
)
def test_file_system_by_mount_table(path: str, kind: str) -> None:
    """Fault: NFS recognised by a word in df's output (server names, wrapped lines, translated headers)."""
    assert filesystem_type(path, MOUNTS) == kind


def test_only_network_file_systems_count() -> None:
    """Fault: a warning for a local disk whose device is named nfs_disk; none for NFS."""
    assert is_network_filesystem("nfs4") and is_network_filesystem("nfs") and is_network_filesystem("lustre")
    assert not any(is_network_filesystem(kind) for kind in ("ext4", "overlay", "xfs", "tmpfs", "", "nfsd"))


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_mount_table_is_read(path: str, table: str) -> None:
    """Fault: a mount table of another kernel raises."""
    assert isinstance(filesystem_type("/" + path, table), str)


def test_file_system_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    """Fault: a folder not yet created counts as unknown, or the probe waits for df."""
    fake = tmp_path / "root"
    write(fake, "proc/self/mountinfo", "1 0 0:1 / / rw - tmpfs none rw\n")
    assert filesystem_of(tmp_path / "not" / "yet", fake) == "tmpfs"
    assert filesystem_of(tmp_path, tmp_path / "empty") == ""


def test_links_are_followed(tmp_path: Path) -> None:
    """Fault: a cache folder linked into NFS counts as local."""
    target = tmp_path / "nfs"
    target.mkdir()
    link = tmp_path / "cache"
    try:
        link.symlink_to(target)
    except OSError:
        pytest.skip("symbolic links are not permitted here")
    fake = tmp_path / "root"
    mounts = f"1 0 0:1 / / rw - ext4 none rw\n2 1 0:2 / {target.resolve()} rw - nfs4 s:/ rw\n"
    write(fake, "proc/self/mountinfo", mounts)
    assert filesystem_of(link / "x", fake) == "nfs4"
