"""Lockstep: online RL for language models in which trainer and inference engine provably agree."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.other_builds import hide_other_builds
from lockstep.terminal_log import show_messages

if TYPE_CHECKING:
    from lockstep.run.trainers.grpo import GRPOTrainer
    from lockstep.run.trainers.online_dpo import OnlineDPOTrainer
    from lockstep.run.trainers.ppo import PPOTrainer
    from lockstep.run.trainers.reinforce_pp import ReinforcePPTrainer
    from lockstep.run.trainers.rloo import RLOOTrainer
    from lockstep.training.generate.rollouts.function import generate_rollout_completions
    from lockstep.training.methods.grpo_config import GRPOConfig
    from lockstep.training.methods.online_dpo import OnlineDPOConfig
    from lockstep.training.methods.ppo import PPOConfig
    from lockstep.training.methods.reinforce_pp import ReinforcePPConfig
    from lockstep.training.methods.rloo import RLOOConfig

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
    "generate_rollout_completions",
]
_WHERE = {
    "GRPOConfig": "training.methods.grpo_config",
    "GRPOTrainer": "run.trainers.grpo",
    "OnlineDPOConfig": "training.methods.online_dpo",
    "OnlineDPOTrainer": "run.trainers.online_dpo",
    "PPOConfig": "training.methods.ppo",
    "PPOTrainer": "run.trainers.ppo",
    "ReinforcePPConfig": "training.methods.reinforce_pp",
    "ReinforcePPTrainer": "run.trainers.reinforce_pp",
    "RLOOConfig": "training.methods.rloo",
    "RLOOTrainer": "run.trainers.rloo",
    "generate_rollout_completions": "training.generate.rollouts.function",
}


def __getattr__(name: str) -> Any:
    # vLLM must see our environment settings before it is imported, and `lockstep --help` must not import torch.
    if name in _WHERE:
        return getattr(import_module(f"lockstep.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Without the names that this file imports for itself.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


hide_other_builds()
show_messages()
