"""The face: DeepSpeed's module paths for the compiled ops of :mod:`deepspeed_ops`. It re-exports and computes nothing.

Importing it imports no torch, compiles nothing, probes nothing and prints nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed._lazy import reexport

if TYPE_CHECKING:
    from deepspeed import accelerator as accelerator
    from deepspeed import env_report as env_report
    from deepspeed import git_version_info as git_version_info
    from deepspeed import ops as ops
    from deepspeed_ops.accelerator import get_accelerator as get_accelerator

_ENGINE = "for the engine: pip uninstall deepspeed, then install the upstream DeepSpeed in an environment of its own"
_TORCH = "use torch's own: "
_ABSENT = {
    "initialize": _ENGINE + "; without it: deepspeed.ops.adam.FusedAdam(model.parameters()) in a plain torch loop",
    "init_inference": _ENGINE,
    "tp_model_init": _ENGINE,
    "add_config_arguments": _ENGINE,
    "default_inference_config": _ENGINE,
    "init_distributed": _TORCH + "torch.distributed.init_process_group()",
    "comm": _TORCH + "torch.distributed",
    "zero": _ENGINE + "; torch's own sharding is torch.distributed.fsdp.fully_shard",
    "runtime": _ENGINE,
    "pipe": _ENGINE,
    "PipelineModule": _ENGINE,
    "moe": _ENGINE,
    "module_inject": _ENGINE,
    "inference": _ENGINE,
    "InferenceEngine": _ENGINE,
    "DeepSpeedInferenceConfig": _ENGINE,
    "DeepSpeedEngine": _ENGINE,
    "DeepSpeedHybridEngine": _ENGINE,
    "DeepSpeedOptimizer": _ENGINE,
    "ZeROOptimizer": _ENGINE,
    "DeepSpeedConfig": _ENGINE,
    "DeepSpeedConfigError": _ENGINE,
    "DeepSpeedTransformerLayer": _TORCH + "torch.nn.TransformerEncoderLayer",
    "DeepSpeedTransformerConfig": _TORCH + "torch.nn.TransformerEncoderLayer",
    "OnDevice": _TORCH + "torch.device('meta') as a context",
    "checkpointing": _TORCH + "torch.utils.checkpoint",
    "launcher": _TORCH + "torchrun",
    "elasticity": _TORCH + "torchrun --nnodes MIN:MAX",
    "monitor": _ENGINE,
    "profiling": _TORCH + "torch.profiler",
    "autotuning": _ENGINE,
    "compression": _ENGINE,
    "sequence": _ENGINE,
    "utils": _ENGINE,
    "HAS_TRITON": "ask importlib.util.find_spec('triton')",
}

__all__ = ["__version__", "__git_hash__", "__git_branch__", "accelerator", "env_report", "get_accelerator", "ops"]
__getattr__, __dir__ = reexport(
    __name__,
    {
        "__version__": "deepspeed_ops.git_version_info:version",
        "__git_hash__": "deepspeed_ops.git_version_info:git_hash",
        "__git_branch__": "deepspeed_ops.git_version_info:git_branch",
        "accelerator": "deepspeed.accelerator",
        "env_report": "deepspeed.env_report",
        "get_accelerator": "deepspeed_ops.accelerator:get_accelerator",
        "git_version_info": "deepspeed.git_version_info",
        "ops": "deepspeed.ops",
    },
    _ABSENT,
)
