"""`GRPOTrainer`: GRPO and its relatives in the shared loop, with TRL's constructor."""

from __future__ import annotations

from lockstep.training.methods.grpo import GRPOObjective
from lockstep.training.methods.grpo_config import GRPOConfig
from lockstep.training.trainers.online import OnlineTrainer


class GRPOTrainer(OnlineTrainer):
    """Group Relative Policy Optimization with an engine that provably holds the policy's weights.

    Arguments and errors: `lockstep.training.trainers.online.OnlineTrainer`.
    """

    config_class = GRPOConfig
    method = "GRPO"
    objective_class = GRPOObjective
