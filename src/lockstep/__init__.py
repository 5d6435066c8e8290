"""Lockstep: online RL for language models in which trainer and inference engine provably agree."""

from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError, LockstepError, ProofError

if TYPE_CHECKING:
    from lockstep.training.grpo import GRPOTrainer
    from lockstep.training.grpo_config import GRPOConfig

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "InputError", "LockstepError", "ProofError"]


def __getattr__(name: str) -> Any:
    # vLLM must see our environment settings before it is imported, and `lockstep --help` must not import torch.
    if name == "GRPOConfig":
        from lockstep.training.grpo_config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        from lockstep.training.grpo import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
