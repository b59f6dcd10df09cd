"""Building, installing and looking into what was built, for the packaging tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Prefixes: CUDA_HOME and CUDA_PATH, CXX and CXXFLAGS, ...
CLEARED = ("DS_", "TORCH_", "MAX_JOBS", "CUDA_", "CC", "CXX", "CFLAGS", "CPPFLAGS", "LDFLAGS", "PYTHON")
ARCHS = "7.5;8.6"


def clean_env(**more: str) -> dict[str, str]:
    """The environment without anything that changes what is built or found."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith(CLEARED)}, **more}


def run(
    *argv: str | Path, cwd: Path, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command; its whole output stands in the failure."""
    done = subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env=dict(clean_env() if env is None else env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=600,
        check=False,
    )
    assert not check or done.returncode == 0, f"{argv} gave {done.returncode}:\n{done.stdout}"
    return done


def sources() -> list[Path]:
    """What git tracks or would take in, relative to the checkout; without git (an sdist) what lies there."""
    if (ROOT / ".git").exists():
        listing = run(
            "git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT
        ).stdout
        return [Path(f) for f in listing.split("\0") if f and (ROOT / f).is_file()]
    skipped = {"build", "dist", "parts", ".venv", "__pycache__"}
    files = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
    return [f for f in files if not skipped & set(f.parts)]


def copy_checkout(target: Path) -> Path:
    """A checkout of its own, without git: builds write ``build`` and ``*.egg-info`` there, not here."""
    for file in sources():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target / file)
    return target


def build(checkout: Path, out: Path, *kinds: str, **env: str) -> tuple[list[Path], str]:
    """(files built, output) of ``python -m build`` with this interpreter's packages."""
    argv = [sys.executable, "-m", "build", "--no-isolation", *kinds, "-o", out, "."]
    output = run(*argv, cwd=checkout, env=clean_env(**env)).stdout
    return sorted(out.iterdir()), output


def names(archive: Path) -> list[str]:
    """Files of a wheel, without the folder whose name holds the version."""
    with zipfile.ZipFile(archive) as wheel:
        return sorted(n for n in wheel.namelist() if ".dist-info/" not in n)


@dataclass(frozen=True)
class Venv:
    """A fresh environment with one of our distributions in it."""

    python: Path
    root: Path

    @property
    def site(self) -> Path:
        """Its site-packages."""
        found = run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=self.root).stdout
        return Path(found.strip())


def make_venv(root: Path, python: Path | str = sys.executable, borrow: bool = True) -> Venv:
    """An environment without pip.

    Args:
        root: where.
        python: its interpreter.
        borrow: also see the packages of the environment that runs the tests (torch is half a gigabyte), but not its
            installation of this project: a ``.pth`` entry does not follow the other folder's ``.pth`` files.
    """
    run(python, "-m", "venv", "--without-pip", root, cwd=root.parent)
    folder = "Scripts" if os.name == "nt" else "bin"
    venv = Venv(root / folder / ("python.exe" if os.name == "nt" else "python"), root)
    if borrow:
        (venv.site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return venv


def install(venv: Venv, *what: str | Path, **env: str) -> str:
    """Install with the pip of the environment that runs the tests; no dependencies."""
    argv = [sys.executable, "-m", "pip", "--python", venv.python, "install", "-q", "--no-deps", "--force-reinstall"]
    return run(*argv, *what, cwd=venv.root, env=clean_env(**env)).stdout
