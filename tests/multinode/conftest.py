"""Collected by ``make multinode`` only, which brings the namespaces; elsewhere these tests are not even looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_LAB = os.environ.get("DS_TEST_MULTINODE", "")
collect_ignore_glob = [] if IN_LAB else ["test_*.py"]

if IN_LAB:
    from lab import Lab

    @pytest.fixture(scope="session")
    def lab() -> Iterator[Lab]:
        """Three hosts, all up; a test that changes one puts it back."""
        with Lab(Path(IN_LAB) / "lab") as made:
            yield made

    @pytest.fixture(scope="session")
    def wheel(lab: Lab) -> Path:
        """The wheel that ``make multinode`` built, under a path with a blank and a letter beyond ASCII."""
        (found,) = (Path(IN_LAB) / "wheel ü").glob("*.whl")
        return found
