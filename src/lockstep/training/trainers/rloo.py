"""`RLOOTrainer`: RLOO in the shared loop, with TRL's constructor."""

from __future__ import annotations

from lockstep.training.methods.rloo import RLOOConfig, RLOOObjective
from lockstep.training.trainers.online import OnlineTrainer


class RLOOTrainer(OnlineTrainer):
    """REINFORCE leave-one-out with an engine that provably holds the policy's weights.

    Arguments and errors: `lockstep.training.trainers.online.OnlineTrainer`.
    """

    config_class = RLOOConfig
    method = "RLOO"
    objective_class = RLOOObjective
