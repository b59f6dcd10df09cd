"""A cell's image: parts from the store, the rest from ``docker/Dockerfile`` by an engine; checked, then tagged."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from op_builder.cells import Cell
from op_builder.errors import EngineMissing, ImageFailed, OpsError
from op_builder.files import FILES
from op_builder.matrix import load
from op_builder.store import Part

from . import dockerfile, own_engine, parts, pip_settings
from .engines import Engine, failure, full_disk, never
from .parts import Workplace

# What decides the wheel inside an image.
WHEEL_SOURCES = (
    *("version.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "op_builder", "csrc", "src"),
    *("ci/matrix.toml", "ci/build_backend.py"),
)
# What a record says of an image.
IMAGE_KEYS = ("engine", "image", "tags", "layers", "image_bytes", "image_seconds")
_NEEDED_GB = {"base": 0.8, "cpu": 4.0, "cuda": 16.0}


def cell_digest(cell: Cell, keys: Iterable[str], home: Path) -> str:
    """Digest of everything that decides a cell: keys of its parts, Dockerfile, arguments, sources of the wheel."""
    given = dockerfile.arguments(cell) if cell.tags else {}
    text = json.dumps([sorted(keys), sources_digest(home) if cell.tags else "", given], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources_digest(home: Path) -> str:
    """Digest of the Dockerfile and of the wheel's sources, read once per process."""
    files: dict[str, str] = {}
    for name in (dockerfile.DOCKERFILE.as_posix(), *WHEEL_SOURCES):
        top = home / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
                files[path.relative_to(home).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def build_image(
    cell: Cell, made: Sequence[Part], place: Workplace, engine: Engine, torch_index: str = "", revision: str = ""
) -> dict[str, Any]:
    """Build, measure and tag the image of a cell.

    Args:
        cell: one with an image.
        made: its parts.
        place: farm and voices.
        engine: what builds.
        torch_index: torch's own wheel index, where the cell's torch comes from there.
        revision: commit, for the label.

    Returns:
        For the record: image id, sizes of the layers, seconds.

    Raises:
        StoreError: the disk is full; nothing was tagged.
        ImageFailed: a step failed, or the image is larger than the matrix allows.
        EngineMissing: the base image is not here and cannot be pulled.
    """
    start = time.monotonic()
    given = dockerfile.arguments(cell)
    need_base(engine, given["BASE"])
    parts.refuse_little_space(place.farm.root, _NEEDED_GB["cpu" if cell.cuda is None else "cuda"])
    folder = place.farm.contexts / cell.name
    parts.export(made, folder / "parts")
    with tempfile.TemporaryDirectory(prefix="ds-farm-") as private:
        words = build_words(engine, place, given, folder, torch_index, revision, Path(private))
        for name, value in dockerfile.labels(cell).items():
            words += ["--label", f"{name}={value}"]
        # apt hangs on a full disk: such a build is ended.
        storage = engine.storage()
        full = full_disk(storage) if storage else never
        answer = engine(*words, str(place.home), tell=_steps(place.say), reason_to_end=full)
        if answer.code and _KNOWS_NO_NETWORK in answer.output:
            words[words.index("--file") + 1] = str(without_network_flag(place.home, Path(private)))
            place.say("this podman's RUN knows no --network: here the compile steps are not cut off from the network")
            answer = engine(*words, str(place.home), tell=_steps(place.say), reason_to_end=full)
        if answer.code:
            raise failure(f"the image of {cell.name} could not be built", answer)
        image = (Path(private) / "iid").read_text(encoding="utf-8").strip()
    ledger = ledger_of(engine.layers(image))
    try:
        check_sizes(cell, ledger)
        health(engine, cell, image)
    except OpsError:
        engine("image", "rm", image)
        raise
    for tag in cell.tags:
        engine.ask("tag", image, tag)
    return {
        "engine": engine.name,
        "image": image,
        "tags": list(cell.tags),
        "layers": ledger,
        "image_bytes": sum(ledger.values()),
        "image_seconds": round(time.monotonic() - start, 1),
    }


# What buildah says before the release that learned RUN --network.
_KNOWS_NO_NETWORK = "RUN only supports the --mount flag"


def without_network_flag(home: Path, private: Path) -> Path:
    """A copy of the Dockerfile for an engine that is too old for ``RUN --network=none``, the same but for that flag."""
    text = (home / dockerfile.DOCKERFILE).read_text(encoding="utf-8")
    copy = private / "Dockerfile"
    copy.write_text(text.replace("RUN --network=none ", "RUN "), encoding="utf-8")
    return copy


def build_words(
    engine: Engine,
    place: Workplace,
    given: dict[str, str],
    folder: Path,
    torch_index: str,
    revision: str,
    private: Path,
) -> list[str]:
    """The command line of a build, without its context."""
    settings = pip_settings.read(place.settings.env)
    (private / "pip.conf").write_text(settings.conf, encoding="utf-8")
    words = ["build"] if engine.name == "podman" else ["buildx", "build", "--progress", "plain", "--load"]
    words += ["--format", "docker", "--layers"] if engine.name == "podman" else []
    words += ["--file", str(place.home / dockerfile.DOCKERFILE), "--target", dockerfile.TARGET]
    if engine.name == "podman":  # which looks for it beside the context, not beside the file
        words += ["--ignorefile", str(place.home / f"{dockerfile.DOCKERFILE}.dockerignore")]
    words += ["--iidfile", str(private / "iid"), "--secret", f"id=pip_conf,src={private / 'pip.conf'}"]
    words += ["--secret", f"id=pip_ca,src={settings.ca}"] if settings.ca else []
    words += ["--build-context", f"parts={folder / 'parts'}"]
    wheels = torch_wheels(place, given["TORCH"], torch_index) if "+" in given["TORCH"] else None
    words += ["--build-context", f"wheels={wheels}"] if wheels else []
    version = (place.home / "version.txt").read_text(encoding="utf-8").strip()
    values = {**given, "TORCH_INDEX": "" if wheels else torch_index, "VERSION": version, "REVISION": revision}
    for name, value in values.items():
        words += ["--build-arg", f"{name}={value}"]
    return words


def torch_wheels(place: Workplace, requirement: str, index: str) -> Path:
    """A folder with the torch wheel of this very build, taken once by the host's pip.

    Raises:
        ImageFailed: pip does not find it.
    """
    folder = place.farm.root / "wheels" / requirement
    if any(folder.glob("*.whl")):
        return folder
    version = load().image.python
    place.say(f"fetching {requirement}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", fresh]
        pip += ["--python-version", version, "--disable-pip-version-check"]
        pip += ["--index-url", index] if index else []
        done = subprocess.run(
            [*pip, requirement], env=dict(place.settings.env), stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="replace", timeout=3600, check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            fix = "--torch-index (or DS_TORCH_INDEX): the URL of torch's own wheel index for this build"
            raise ImageFailed(f"{requirement} cannot be had", last, fix)
        FILES.remove_tree(folder)
        folder.mkdir()
        for wheel in Path(fresh).glob("*.whl"):
            wheel.rename(folder / wheel.name)
    return folder


def _steps(say: Callable[[str], None]) -> Callable[[str], None]:
    """Of a build's output only the lines that name a step of the file."""

    seen: set[str] = set()

    def tell(line: str) -> None:
        step = re.fullmatch(r"(?:#\d+ )?\[([\w-]+ \d+/\d+)\] (?:STEP \S+ )?([A-Z]+)\b.*?([\w.=+-]+)\s*", line)
        if step is not None and step[1] not in seen:
            seen.add(step[1])
            say(f"  {step[1]} {step[2]} ... {step[3]}")

    return tell


def need_base(engine: Engine, base: str) -> None:
    """Have the base image in the engine's storage.

    Raises:
        EngineMissing: it is not there and cannot be pulled.
    """
    if engine.has(base):
        return
    answer = engine("pull", base)
    if answer.code:
        last = (answer.output.strip().splitlines() or ["no answer"])[-1]
        fix = "ci/farm engine base makes one with mmdebstrap, without a registry"
        raise EngineMissing(f"base image {base} is not here and cannot be pulled", last, fix)


def make_base(engine: Engine, place: Workplace) -> None:
    """The base image of the matrix from Debian's packages, without a registry.

    Raises:
        StoreError: the temporary folder, in which mmdebstrap's apt would wait for ever, has too little room.
        OpsError: mmdebstrap failed, or the engine refused the result.
    """
    base = load().image.base
    codename = base.rpartition(":")[2].partition("-")[0]
    tarball = place.farm.root / "base" / f"{codename}.tar"
    if not tarball.is_file():
        parts.refuse_little_space(Path(tempfile.gettempdir()), _NEEDED_GB["base"])
        place.say(f"making {base} with mmdebstrap")
    own_engine.make_base(tarball, codename)
    engine.ask("import", "--change", 'CMD ["/bin/bash"]', str(tarball), base)


def ledger_of(layers: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Bytes of an image by what they are: ``base``, ``python``, ``torch``, ``ours``."""
    found = dict.fromkeys(("base", "python", "torch", "ours"), 0)
    kind = "base"
    for made, size in layers:
        if "useradd" in made:
            kind = "python"
        elif "/wheels" in made:
            kind = "torch"
        elif "/wheel/" in made or "deepspeed-ops" in made:
            kind = "ours"
        found[kind] += size
    return found


def check_sizes(cell: Cell, ledger: dict[str, int]) -> None:
    """Hold an image against the limits of ``[image.most_mb]``.

    Raises:
        ImageFailed: it is larger.
    """
    most = load().image.most_mb
    whole = "cpu" if cell.cuda is None else "cuda"
    for name, size in (("ours", ledger["ours"]), (whole, sum(ledger.values()))):
        if size > most[name] * 1_000_000:
            what = f"the image of {cell.name} is too large: {name} has {size / 1e6:.1f} MB"
            why = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in ledger.items())
            raise ImageFailed(what, f"at most {most[name]} MB; {why}", "find what grew, or raise [image.most_mb]")


HARDENED = ("--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def health(engine: Engine, cell: Cell, image: str) -> None:
    """Load every op in a hardened container of the image.

    Raises:
        ImageFailed: one does not load.
    """
    answer = engine(
        "run", *HARDENED, "-e", "DS_JIT=0", "--entrypoint", "python", image, "-m", "deepspeed_ops.container", "health"
    )
    if answer.code:
        raise ImageFailed(f"the image of {cell.name} is not healthy", answer.output.strip(), "")
