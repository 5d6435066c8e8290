"""`ReinforcePPTrainer`: REINFORCE++ in the shared loop."""

from __future__ import annotations

from lockstep.training.methods.reinforce_pp import ReinforcePPConfig, ReinforcePPObjective
from lockstep.training.trainers.online import OnlineTrainer


class ReinforcePPTrainer(OnlineTrainer):
    """REINFORCE++ with an engine that provably holds the policy's weights.

    Arguments and errors: `lockstep.training.trainers.online.OnlineTrainer`.
    """

    config_class = ReinforcePPConfig
    method = "REINFORCE++"
    objective_class = ReinforcePPObjective
