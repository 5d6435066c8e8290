"""Lockstep: online RL for language models in which trainer and inference engine provably agree."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError, LockstepError, ProofError

if TYPE_CHECKING:
    from lockstep.training.grpo import GRPOTrainer
    from lockstep.training.grpo_config import GRPOConfig
    from lockstep.training.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from lockstep.training.ppo import PPOConfig, PPOTrainer
    from lockstep.training.reinforce_pp import ReinforcePPConfig, ReinforcePPTrainer
    from lockstep.training.rloo import RLOOConfig, RLOOTrainer

__version__ = "0.1.0"
__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "InputError",
    "LockstepError",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "ProofError",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforcePPConfig",
    "ReinforcePPTrainer",
]
_WHERE = {
    "GRPOConfig": "grpo_config",
    "GRPOTrainer": "grpo",
    "OnlineDPOConfig": "online_dpo",
    "OnlineDPOTrainer": "online_dpo",
    "PPOConfig": "ppo",
    "PPOTrainer": "ppo",
    "RLOOConfig": "rloo",
    "RLOOTrainer": "rloo",
    "ReinforcePPConfig": "reinforce_pp",
    "ReinforcePPTrainer": "reinforce_pp",
}


def __getattr__(name: str) -> Any:
    # vLLM must see our environment settings before it is imported, and `lockstep --help` must not import torch.
    if name in _WHERE:
        return getattr(import_module(f"lockstep.training.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
