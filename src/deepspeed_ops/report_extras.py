"""Extras of this distribution: what each asks for, and what of it is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

DISTRIBUTIONS = ("deepspeed", "deepspeed-ops")


@dataclass(frozen=True)
class ExtraLine:
    """One extra: its requirements, and those of them that are missing or of another version."""

    name: str
    requirements: tuple[str, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


def extra_lines(
    requires: Callable[[str], tuple[list[str], list[str]]] | None = None,
    version: Callable[[str], str] = importlib.metadata.version,
) -> tuple[ExtraLine, ...]:
    """Every extra of the installed distribution; none where it is not installed.

    Args:
        requires: gives the extras and the requirements of a distribution.
        version: gives the installed version of one.
    """
    from packaging.requirements import Requirement

    ask = requires or _requires
    extras, wanted = next((found for name in DISTRIBUTIONS if (found := ask(name))[0]), ([], []))
    lines = []
    for extra in extras:
        own, missing = [], []
        for text in wanted:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
                continue
            shown = f"{requirement.name}{requirement.specifier}"
            own.append(shown)
            if not _satisfied(requirement, version):
                missing.append(shown)
        lines.append(ExtraLine(extra, tuple(own), tuple(missing)))
    return tuple(lines)


def _requires(name: str) -> tuple[list[str], list[str]]:
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return [], []
    return metadata.get_all("Provides-Extra") or [], metadata.get_all("Requires-Dist") or []


def _satisfied(requirement: Any, version: Callable[[str], str]) -> bool:
    try:
        return bool(requirement.specifier.contains(version(requirement.name), prereleases=True))
    except importlib.metadata.PackageNotFoundError:
        return False
