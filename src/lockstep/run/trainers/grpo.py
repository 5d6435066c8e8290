"""`GRPOTrainer`: GRPO and its relatives in the shared loop, with TRL's constructor."""

from __future__ import annotations

from lockstep.run.trainers.online import OnlineTrainer
from lockstep.training.methods.grpo import GRPOObjective
from lockstep.training.methods.grpo_config import GRPOConfig


class GRPOTrainer(OnlineTrainer[GRPOConfig]):
    """Group Relative Policy Optimization with an engine that provably holds the policy's weights.

    Example:
        ```python
        def short(completions, **columns):
            return [-float(len(text)) for text in completions]

        config = GRPOConfig(output_dir="out", max_steps=20, max_completion_length=64)
        trainer = GRPOTrainer("Qwen/Qwen3-0.6B", short, config, dataset)  # a dataset with a column `prompt`
        trainer.train()
        trainer.end()
        ```

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions, `args` (a
    `GRPOConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = GRPOConfig
    method = "GRPO"
    objective_class = GRPOObjective
