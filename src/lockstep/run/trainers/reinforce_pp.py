"""`ReinforcePPTrainer`: REINFORCE++ in the shared loop."""

from __future__ import annotations

from lockstep.run.trainers.online import OnlineTrainer
from lockstep.training.methods.reinforce_pp import ReinforcePPConfig, ReinforcePPObjective


class ReinforcePPTrainer(OnlineTrainer[ReinforcePPConfig]):
    """REINFORCE++ with an engine that provably holds the policy's weights.

    Example:
        ```python
        def short(completions, **columns):
            return [-float(len(text)) for text in completions]

        config = ReinforcePPConfig(output_dir="out", max_steps=20, max_completion_length=64)
        trainer = ReinforcePPTrainer("Qwen/Qwen3-0.6B", short, config, dataset)  # a dataset with a column `prompt`
        trainer.train()
        trainer.end()
        ```

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions, `args` (a
    `ReinforcePPConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = ReinforcePPConfig
    method = "REINFORCE++"
    objective_class = ReinforcePPObjective
