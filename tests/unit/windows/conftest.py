"""Each test of this folder is a machine of its own."""

from __future__ import annotations

import pytest

from op_builder import toolchain_msvc


@pytest.fixture(autouse=True)
def nothing_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt script's answer is kept for a process; here the next test is another one."""
    monkeypatch.setattr(toolchain_msvc, "_captured", {})
