"""What our images run, as ``python -m deepspeed_ops.container``: ``run CMD...`` greets and
becomes CMD, ``health`` loads every op.

The greeting is three lines on standard error: the cell, the GPUs seen, the ops ready. It builds nothing, needs no torch
and never stops the command from running.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_ops.op_builder import HOME
from deepspeed_ops.op_builder.errors import OpsError
from deepspeed_ops.op_builder.host import HostFacts
from deepspeed_ops.op_builder.loader import Loader
from deepspeed_ops.op_builder.resolve import Resolution
from deepspeed_ops.op_builder.settings import Settings
from deepspeed_ops.op_builder.spec import all_specs


def greeting(cell: str, host: HostFacts, found: Sequence[Resolution]) -> list[str]:
    """The three lines.

    Args:
        cell: name of the image's cell, ``""`` outside an image.
        host: the machine.
        found: every op, resolved for the host and for each GPU.
    """
    names = [f"{d.name or 'GPU'} ({'.'.join(map(str, d.capability))})" for d in host.devices]
    gpus = ", ".join(names) if names else "none visible (docker run --gpus all shows them to a container)"
    ready = {r.op for r in found} - {r.op for r in found if r.action != "load"}
    later = sorted({r.op for r in found if r.action == "build"})
    failing = sorted({r.op for r in found if r.action == "fail"} - set(later))
    text = f"{len(ready)} of {len({r.op for r in found})} ops ready"
    if later:
        how = sorted({r.choice.name for r in found if r.action == "build" and r.choice is not None})
        text += f"; {', '.join(later)} compiled at first use, this image holds no part for it ({'; '.join(how)})"
    if failing:
        text += f"; {', '.join(failing)} cannot run here: ds_report says why"
    return [f"deepspeed ops: {cell or 'no image'}", f"GPUs: {gpus}", text]


def resolved(env: Mapping[str, str], host: HostFacts, home: Path = HOME) -> list[Resolution]:
    """Every op for this host and each of its GPUs."""
    loader = Loader(Settings.read(env), home=home, host=host)
    out = []
    for spec in all_specs().values():
        if spec.host:
            out.append(loader.resolution(spec.name))
        out += [loader.resolution(spec.name, device) for device in host.devices if spec.device]
    return out


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Greet, then become the command; 127 where there is none of that name."""
    from deepspeed_ops.op_builder.host import detect

    try:
        host = detect(env)
        lines = greeting(env.get("DS_CELL", ""), host, resolved(env, host))
    except OpsError as exc:
        lines = [f"deepspeed ops: {env.get('DS_CELL', '')}", *str(exc).splitlines()]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
    if not command:
        return 0
    env = {**env, **temporary(env)}
    try:
        os.execvpe(command[0], list(command), env)
    except OSError as exc:
        sys.stderr.write(f"{command[0]}: {exc.strerror}\n")
        return 127


def temporary(env: Mapping[str, str]) -> dict[str, str]:
    """``TMPDIR`` for a read-only container without a tmpfs, where torch itself does not import: shared memory."""
    try:
        tempfile.gettempdir()
    except OSError:
        if not env.get("TMPDIR") and os.access("/dev/shm", os.W_OK | os.X_OK):
            return {"TMPDIR": "/dev/shm"}
    return {}


def health(env: Mapping[str, str]) -> int:
    """Load every op's host library, and resolve its GPU code for every GPU; 0 if all went well."""
    from deepspeed_ops.op_builder.host import detect

    host = detect(env)
    loader = Loader(Settings.read(env), home=HOME, host=host)
    failed = 0
    for spec in all_specs().values():
        try:
            if spec.host:
                loader.host_module(spec.name)
            for device in host.devices if spec.device else ():
                found = loader.resolution(spec.name, device)
                if found.action == "fail":
                    raise found.error()
        except OpsError as exc:
            failed += 1
            sys.stderr.write(f"{spec.name}: {exc}\n")
        else:
            sys.stdout.write(f"{spec.name}: ok\n")
    return int(failed > 0)


def main(arguments: Sequence[str]) -> int:
    """``run CMD...`` or ``health``."""
    env = dict(os.environ)
    if list(arguments) == ["health"]:
        return health(env)
    if arguments and arguments[0] == "run":
        return run(arguments[1:], env)
    sys.stderr.write(f"{__doc__}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
