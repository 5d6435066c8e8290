"""`PPOTrainer`: PPO in the shared loop. It owns the value head. The optimizer trains policy and value head together."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.training.methods.ppo import PPOConfig, PPOObjective


class PPOTrainer(OnlineTrainer[PPOConfig]):
    """Proximal Policy Optimization with an engine that provably holds the policy's weights.

    The value head is trained with the policy. Checkpoints contain it in a separate file, and it is never sent to the engine.

    Example:
        ```python
        def short(completions, **columns):
            return [-float(len(text)) for text in completions]

        config = PPOConfig(output_dir="out", max_steps=20, max_completion_length=64)
        trainer = PPOTrainer("Qwen/Qwen3-0.6B", short, config, dataset)  # a dataset with a column `prompt`
        trainer.train()
        trainer.end()
        ```

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions, `args` (a
    `PPOConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = PPOConfig
    method = "PPO"
    objective_class = PPOObjective

    def make_critic(self, policy: PreTrainedModel) -> torch.nn.Module:
        head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        # Values are 0 at the start. So the first advantages come from the rewards alone, and no random head changes the trunk.
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        return head

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        assert self.critic is not None
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # An optimizer that the user made does not contain the head's parameters.
        if missing := [p for p in self.critic.parameters() if id(p) not in held]:
            if self.lr_scheduler is not None:
                raise InputError(
                    "PPO adds its value head to the optimizer, which a scheduler made before does not follow; give "
                    "optimizers=(optimizer, None)"
                )
            optimizer.add_param_group({"params": missing, "lr": self._value_rate, "weight_decay": 0.0})
        return optimizer

    @property
    def _value_rate(self) -> float:
        given = self.config.value_learning_rate
        return 10 * self.config.learning_rate if given is None else given
