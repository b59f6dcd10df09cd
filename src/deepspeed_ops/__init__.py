"""Compiled ops for deep learning: the work behind the names of :mod:`deepspeed`.

Importing this package imports no torch, compiles nothing and looks at nothing; every name arrives at its first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_ops.version import Version

# In a checkout op_builder and csrc lie two folders up; an installed package holds them itself. Letting the package
# look there too makes `PYTHONPATH=src` and an editable installation equal to an installed wheel.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "op_builder").is_dir():
    __path__.append(str(_HERE.parent.parent))

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version_info().version
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def version_info() -> Version:
    """Version, git hash and branch of this installation or checkout."""
    from deepspeed_ops import version

    return version.current()
