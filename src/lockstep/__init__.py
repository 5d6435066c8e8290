"""Lockstep: online RL for language models in which trainer and inference engine provably agree."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.start_up import hide_other_builds, show_messages

if TYPE_CHECKING:
    from lockstep.learn.methods.grpo import GRPOConfig
    from lockstep.learn.methods.online_dpo import OnlineDPOConfig
    from lockstep.learn.methods.ppo import PPOConfig
    from lockstep.learn.methods.reinforce_pp import ReinforcePPConfig
    from lockstep.learn.methods.rloo import RLOOConfig
    from lockstep.run.programs import generate_rollout_completions
    from lockstep.run.trainers.methods import (
        GRPOTrainer,
        OnlineDPOTrainer,
        PPOTrainer,
        ReinforcePPTrainer,
        RLOOTrainer,
    )

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
    "GRPOConfig": "learn.methods.grpo",
    "GRPOTrainer": "run.trainers.methods",
    "OnlineDPOConfig": "learn.methods.online_dpo",
    "OnlineDPOTrainer": "run.trainers.methods",
    "PPOConfig": "learn.methods.ppo",
    "PPOTrainer": "run.trainers.methods",
    "ReinforcePPConfig": "learn.methods.reinforce_pp",
    "ReinforcePPTrainer": "run.trainers.methods",
    "RLOOConfig": "learn.methods.rloo",
    "RLOOTrainer": "run.trainers.methods",
    "generate_rollout_completions": "run.programs",
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
