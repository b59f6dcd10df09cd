"""Images to a registry, content-addressed: what is there under its digest is not pushed again."""

from __future__ import annotations

from op_builder.cells import Cell
from op_builder.errors import UsageError

from .engines import Engine, failure


def remote_tags(cell: Cell, digest: str, place: str) -> list[str]:
    """Names of a cell's image in a registry: by its digest first, then its tags.

    Args:
        cell: one with an image.
        digest: of the cell, from its record.
        place: registry and namespace, ``registry.example/team``.
    """
    repository = f"{place.rstrip('/')}/{cell.tags[0].partition(':')[0]}"
    return [f"{repository}:{cell.name}-{digest[:12]}", *(f"{repository}:{tag.partition(':')[2]}" for tag in cell.tags)]


def push(cell: Cell, digest: str, place: str, engine: Engine) -> list[str]:
    """Push a cell's image under all its names; what was pushed, nothing where the registry has this digest.

    Raises:
        UsageError: the image was not built here.
        ImageFailed: the registry refused it.
    """
    names = remote_tags(cell, digest, place)
    if is_there(cell, digest, place, engine):
        return []
    if not engine.has(cell.tags[0]):
        raise UsageError(
            f"{cell.tags[0]} is not here", "only a built image can be pushed", f"ci/farm build {cell.name}"
        )
    for name in [*names[1:], names[0]]:  # the digest last: it says that all of them are there
        engine.ask("tag", cell.tags[0], name)
        answer = engine("push", name)
        if answer.code:
            raise failure(f"{name} could not be pushed", answer)
    return names


def is_there(cell: Cell, digest: str, place: str, engine: Engine) -> bool:
    """Whether a registry has the image of this very digest."""
    words = ["--insecure"] if _is_local(place) and engine.name == "docker" else []
    return engine("manifest", "inspect", *words, remote_tags(cell, digest, place)[0]).code == 0


def _is_local(place: str) -> bool:
    return place.partition("/")[0].partition(":")[0] in ("localhost", "127.0.0.1")
