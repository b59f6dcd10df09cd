"""The same definition by the other engine."""

from __future__ import annotations

import json

from op_builder.cells import find_cell
from tests.images.conftest import Images


def test_podman_builds_and_keeps_the_same_promises(podman: Images, cpu: str) -> None:
    """Fault: a Dockerfile that only BuildKit understands."""
    docker_record = json.loads((podman.place.farm.records / "cpu.json").read_text(encoding="utf-8"))
    podman.ci_farm("build", "cpu")
    said = podman.ci_farm("test", "cpu")
    assert said.count("ok      cpu ") == 9 and "FAILED" not in said
    record = json.loads((podman.place.farm.records / "cpu.json").read_text(encoding="utf-8"))
    assert record["engine"] == "podman" and record["digest"] == docker_record["digest"]
    assert record["tags"] == list(find_cell("cpu").tags)
