"""The build backend: setuptools' own, plus the compilers of PyPI that a build asked for by environment needs.

``DS_BUILD_OPS=1 TORCH_CUDA_ARCH_LIST=... pip install .`` builds in an environment that pip makes afresh and that has no
torch, hence no NVRTC. What such a build needs depends on the environment, so it cannot stand in
``pyproject.toml``; PEP 517's ``get_requires_for_build_*`` hooks exist for this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (  # noqa: F401  (hooks that a frontend looks up here)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent


def _compilers() -> list[str]:
    sys.path.insert(0, str(ROOT / "src"))
    try:
        from deepspeed_ops import wheel
    finally:
        sys.path.remove(str(ROOT / "src"))
    return wheel.build_requires()


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What building a wheel needs beyond ``build-system.requires``."""
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *_compilers()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """What an editable installation needs beyond ``build-system.requires``."""
    return [*_setuptools.get_requires_for_build_editable(config_settings), *_compilers()]
