"""The version, and where it comes from.

``version.txt`` holds the release. What is appended to it (DeepSpeed's rule, one case added):

1. ``DS_BUILD_STRING`` if set and not empty; ``setup.py`` also saves it to ``build.txt``. A blank means "no suffix".
2. else the content of ``build.txt``, if that file exists;
3. else ``+`` and the short git hash of the checkout;
4. else, in an unpacked sdist, the suffix that the sdist was made with (``version.json``, written into the sdist);
5. else ``+unknown``.

git is read from its files, not run: a checkout that belongs to another user answers too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

UNKNOWN = "unknown"
RECORD = "version.json"
_HERE = Path(__file__).resolve().parent
_PEP440 = re.compile(
    r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([-_.][a-z0-9]+)*)?", re.IGNORECASE
)


@dataclass(frozen=True)
class Version:
    """What is installed: ``version`` with its suffix, ``git_hash`` (7 digits) and ``git_branch`` or "unknown"."""

    version: str
    git_hash: str = UNKNOWN
    git_branch: str = UNKNOWN

    def to_json(self) -> str:
        """The record that wheels and sdists carry."""
        return json.dumps(asdict(self), indent=2) + "\n"


def current() -> Version:
    """The version of this installation, or of the checkout that this file lies in."""
    root = _HERE.parent.parent
    if (root / "version.txt").is_file() and _HERE.parent.name == "src":
        return of_tree(root, {})
    return _record(_HERE / RECORD) or Version(UNKNOWN)


def of_tree(root: Path, env: Mapping[str, str] | None = None) -> Version:
    """The version that building ``root`` gives.

    Args:
        root: a checkout or an unpacked sdist.
        env: where ``DS_BUILD_STRING`` is looked up; the process environment by default.

    Raises:
        ValueError: the suffix does not make a version that installers accept.
    """
    env = os.environ if env is None else env
    base = (root / "version.txt").read_text(encoding="utf-8").strip()
    recorded = _record(root / "src" / "deepspeed_ops" / RECORD)
    git_hash, branch = git_state(root)
    if git_hash == UNKNOWN and recorded:
        git_hash, branch = recorded.git_hash, recorded.git_branch
    build_string, build_txt = env.get("DS_BUILD_STRING", ""), root / "build.txt"
    if build_string:
        suffix = build_string.strip()
    elif build_txt.is_file():
        suffix = build_txt.read_text(encoding="utf-8").strip()
    elif recorded and recorded.version.startswith(base):
        suffix = recorded.version[len(base) :]
    else:
        suffix = f"+{git_hash}"
    if not _PEP440.fullmatch(base + suffix):
        raise ValueError(
            f"version {base + suffix!r} is not a version that installers accept\n"
            f"  why: {suffix!r} (DS_BUILD_STRING or build.txt) must look like '+local.1', '.dev3', 'rc1' or ' '\n"
            "  fix: DS_BUILD_STRING=+mybuild pip install ."
        )
    return Version(base + suffix, git_hash, branch)


def save_build_string(root: Path, env: Mapping[str, str] | None = None) -> None:
    """Save ``DS_BUILD_STRING`` to ``build.txt``, so that every later step of one build gives the same version."""
    build_string = (os.environ if env is None else env).get("DS_BUILD_STRING", "")
    if build_string:
        (root / "build.txt").write_text(build_string, encoding="utf-8")


def git_state(root: Path) -> tuple[str, str]:
    """Short hash and branch of the checkout ``root``; "unknown" twice where it is none.

    Only ``root`` itself counts: an sdist unpacked inside somebody else's repository is not that repository.
    """
    try:
        git = root / ".git"
        if git.is_file():  # a worktree or a submodule: "gitdir: <path>"
            git = root / git.read_text(encoding="utf-8").split(":", 1)[1].strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head[:7], "HEAD"
        ref = head.split(":", 1)[1].strip()
        full = _resolve(git, ref)
        return (full[:7] if full else UNKNOWN), ref.removeprefix("refs/heads/")
    except (OSError, IndexError, UnicodeDecodeError):
        return UNKNOWN, UNKNOWN


def _resolve(git: Path, ref: str) -> str:
    common = git / "commondir"
    homes = [git, git / common.read_text(encoding="utf-8").strip()] if common.is_file() else [git]
    for home in homes:
        if (home / ref).is_file():
            return (home / ref).read_text(encoding="utf-8").strip()
    for home in homes:
        packed = home / "packed-refs"
        if packed.is_file():
            for line in packed.read_text(encoding="utf-8").splitlines():
                if line.endswith(" " + ref):
                    return line.split(" ", 1)[0]
    return ""


def _record(path: Path) -> Version | None:
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return Version(data["version"], data["git_hash"], data["git_branch"])
