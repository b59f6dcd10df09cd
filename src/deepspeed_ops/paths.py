"""Where this installation's resources lie."""

from __future__ import annotations

from pathlib import Path

import deepspeed_ops.op_builder as _op_builder

HOME = Path(str(_op_builder.__file__)).resolve().parent.parent
"""The checkout, or the installed ``deepspeed_ops``: holds ``csrc``, ``ci/matrix.toml`` and ``parts``."""
