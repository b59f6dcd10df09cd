"""DeepSpeed's names for what is installed: ``version``, ``installed_ops``, ``compatible_ops``, ``torch_info``, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed_ops.git_version_info import accelerator_name as accelerator_name
    from deepspeed_ops.git_version_info import compatible_ops as compatible_ops
    from deepspeed_ops.git_version_info import git_branch as git_branch
    from deepspeed_ops.git_version_info import git_hash as git_hash
    from deepspeed_ops.git_version_info import installed_ops as installed_ops
    from deepspeed_ops.git_version_info import torch_info as torch_info
    from deepspeed_ops.git_version_info import version as version

__all__ = ["version", "git_hash", "git_branch", "installed_ops", "compatible_ops", "accelerator_name", "torch_info"]
__getattr__, __dir__ = reexport(__name__, {name: f"deepspeed_ops.git_version_info:{name}" for name in __all__})
