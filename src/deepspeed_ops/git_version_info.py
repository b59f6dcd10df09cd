"""What is installed, under DeepSpeed's keys. Computed at first use from the store and the version; never a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_ops.op_builder.manifest import Manifest
    from deepspeed_ops.version import Version

version: str
git_hash: str
git_branch: str
installed_ops: dict[str, bool]
compatible_ops: dict[str, bool]
accelerator_name: str
torch_info: dict[str, Any]

__all__ = ["version", "git_hash", "git_branch", "installed_ops", "compatible_ops", "accelerator_name", "torch_info"]


def facts(
    version: Version, built: Sequence[Manifest], ops: Sequence[str], python_only: Sequence[str] = ()
) -> dict[str, Any]:
    """DeepSpeed's keys and their values.

    Args:
        version: of this installation.
        built: manifests of the parts that came with the package.
        ops: names of the registry.
        python_only: those of them that have nothing to compile: always installed.

    Returns:
        ``torch_info['version']`` is ``'0.0'``: nothing here is compiled against torch. ``cuda_version`` is the release
        of the newest GPU compiler among the parts, ``'0.0'`` without GPU parts.
    """
    releases = [m.compiler_release for m in built if m.kind == "device" and m.compiler_release]
    cuda = "{}.{}".format(*max(releases)) if releases else "0.0"
    hosts = {m.op for m in built if m.kind == "host"}
    return {
        "version": version.version,
        "git_hash": version.git_hash,
        "git_branch": version.git_branch,
        "installed_ops": {op: op in hosts or op in python_only for op in ops},
        "accelerator_name": "cuda" if releases else "cpu" if hosts else "",
        "torch_info": {
            "version": "0.0",
            "bf16_support": bool(releases),
            "cuda_version": cuda,
            "nccl_version": "0.0",
            "hip_version": "0.0",
        },
    }


def _current() -> dict[str, Any]:
    from deepspeed_ops.op_builder import HOME
    from deepspeed_ops.op_builder.spec import all_specs
    from deepspeed_ops.version import current
    from deepspeed_ops.wheel import manifests

    specs = all_specs()
    python_only = tuple(name for name, spec in specs.items() if spec.python_only)
    return facts(current(), manifests(HOME / "parts"), tuple(specs), python_only)


def _compatible_ops() -> dict[str, bool]:
    from deepspeed_ops.op_builder import builders

    return {name: bool(builder.is_compatible()) for name, builder in builders.ALL_OPS.items()}


def __getattr__(name: str) -> Any:
    if name == "compatible_ops":
        return _compatible_ops()
    if name in ("version", "git_hash", "git_branch"):
        from deepspeed_ops.version import current

        return getattr(current(), name)
    if name in __all__:
        return _current()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
