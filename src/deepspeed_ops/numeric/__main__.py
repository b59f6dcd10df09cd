"""The child of ``ds_ops verify``: load one op and check its numbers; a line of JSON after each stage."""

from __future__ import annotations

import json
import sys

from deepspeed_ops.numeric import cases, has_check
from deepspeed_ops.op_builder.errors import OpsError
from deepspeed_ops.op_builder.loader import Loader
from deepspeed_ops.op_builder.spec import get_spec


def say(stage: str, **facts: object) -> None:
    """One line that the parent reads even if this process dies right after it."""
    sys.stdout.write("\n" + json.dumps({"stage": stage, **facts}) + "\n")
    sys.stdout.flush()


def main(op: str) -> int:
    """Check one op; 0 if its numbers are right."""
    import torch  # first: TVM-FFI asks whether it is here

    spec, loader = get_spec(op), Loader()
    try:
        if spec.host:
            say("loading")
            loader.host_module(op)
            choice = loader.resolution(op, looked=False).choice
            part = choice.part if choice is not None else None
            say("loaded", part=str(part.path) if part else "", sha256=part.manifest.sha256 if part else "")
        found = cases(op) if has_check(op) else []
    except OpsError as exc:
        say("failed", what=exc.what, why=exc.why, fix=exc.fix)
        return exc.exit_code
    note = "" if has_check(op) else "this op has no numeric check"
    if has_check(op) and not found:
        note = "its numbers come from GPU code, and torch sees no GPU here"
    say("checked", cases=[case.as_dict() for case in found], note=note, torch=torch.__version__)
    return 0 if all(case.good for case in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
