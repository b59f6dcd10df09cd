"""Nothing of ours needs POSIX to be imported, opens a GPU driver, or reads text in the locale's encoding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Everything that Python lacks on Windows is taken away, after the standard library and torch were imported; then every
# module of ours is.
PROGRAM = """
import importlib, os, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {root!r} + "/src"]
posix_only = ["fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "uname", "sched_getaffinity", "statvfs",
              "sched_setaffinity", "register_at_fork", "confstr", "sysconf", "mkfifo", "killpg", "getloadavg", "wait3",
              "RTLD_NOW", "RTLD_LOCAL", "RTLD_GLOBAL", "setsid", "getpgid", "posix_fadvise", "O_DIRECT"]
try:
    import torch, torch.utils, rich, pynvml, tvm_ffi, filelock
except ImportError:
    import filelock
loaded = set(sys.modules)
for name in posix_only:
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog", "readline"):
    sys.modules[name] = None
root = Path({root!r})
files = [f.relative_to(at) for at in (root, root / "src") for p in ("op_builder", "deepspeed_ops", "deepspeed")
         for f in sorted((at / p).rglob("*.py")) if f.name != "__main__.py"]
names = [".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name not in ("torch", "matplotlib", "sklearn", "numpy"):
            raise
print(len(names))
"""


def test_every_module_imports_without_posix() -> None:
    """Fault: AttributeError: module 'os' has no attribute 'fork' (or fcntl, pwd, resource), at import on Windows."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=str(ROOT))], capture_output=True, encoding="utf-8",
        errors="replace", timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 40


def test_imports_open_no_text_in_the_locales_encoding() -> None:
    """Fault: UnicodeDecodeError: 'cp1252' or 'gbk' codec, from a file of ours that holds more than ASCII."""
    code = "import op_builder, op_builder.loader, op_builder.toolchain, op_builder.matrix as m; m.load()"
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", code], cwd=ROOT,
        capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_warning_about_encodings_is_an_error_here() -> None:
    """Fault: the rule is switched off, and nobody notices."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"error::EncodingWarning:(deepspeed|op_builder|' in text
    assert "-X warn_default_encoding -m pytest" in (ROOT / "Makefile").read_text(encoding="utf-8")
