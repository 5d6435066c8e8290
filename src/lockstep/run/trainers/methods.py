"""The trainers of the methods: each names its objective and adds what only its method needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from lockstep.config.fields import AgentFunction
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.learn.methods.online_dpo import OnlineDPOConfig, OnlineDPOObjective
from lockstep.learn.methods.ppo import PPOConfig, PPOObjective
from lockstep.learn.methods.reinforce_pp import ReinforcePPConfig, ReinforcePPObjective
from lockstep.learn.methods.rloo import RLOOConfig, RLOOObjective
from lockstep.rollouts.judges import JudgeScorer
from lockstep.rollouts.programs.environments import Factory
from lockstep.rollouts.rewards import Given, ProcessingClasses, Scorer
from lockstep.run.data.rehearsal import rehearse_judge
from lockstep.run.programs import RolloutFunc
from lockstep.run.trainers.online import Data, OnlineTrainer


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

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions,
    `args` (a `GRPOConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = GRPOConfig
    method = "GRPO"
    objective_class = GRPOObjective


class RLOOTrainer(OnlineTrainer[RLOOConfig]):
    """REINFORCE leave-one-out with an engine that provably holds the policy's weights.

    Example:
        ```python
        def short(completions, **columns):
            return [-float(len(text)) for text in completions]

        config = RLOOConfig(output_dir="out", max_steps=20, max_completion_length=64)
        trainer = RLOOTrainer("Qwen/Qwen3-0.6B", short, config, dataset)  # a dataset with a column `prompt`
        trainer.train()
        trainer.end()
        ```

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions,
    `args` (a `RLOOConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = RLOOConfig
    method = "RLOO"
    objective_class = RLOOObjective


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

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions,
    `args` (a `ReinforcePPConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = ReinforcePPConfig
    method = "REINFORCE++"
    objective_class = ReinforcePPObjective


class PPOTrainer(OnlineTrainer[PPOConfig]):
    """Proximal Policy Optimization with an engine that provably holds the policy's weights.

    The value head is trained with the policy. Checkpoints contain it in a separate file, and it is never sent to the
    engine.

    Example:
        ```python
        def short(completions, **columns):
            return [-float(len(text)) for text in completions]

        config = PPOConfig(output_dir="out", max_steps=20, max_completion_length=64)
        trainer = PPOTrainer("Qwen/Qwen3-0.6B", short, config, dataset)  # a dataset with a column `prompt`
        trainer.train()
        trainer.end()
        ```

    The arguments and errors are those of `lockstep.run.trainers.online.OnlineTrainer`: a model, reward functions,
    `args` (a `PPOConfig`), data, and what a rollout may use: tools, environments, or an agent.
    """

    config_class = PPOConfig
    method = "PPO"
    objective_class = PPOObjective

    def make_critic(self, policy: PreTrainedModel) -> torch.nn.Module:
        head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        # Values are 0 at the start. So the first advantages come from the rewards alone, and no random head changes
        # the trunk.
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
                    "PPO adds its value head to the optimizer, which a scheduler made before does not "
                    "follow; give optimizers=(optimizer, None)"
                )
            optimizer.add_param_group({"params": missing, "lr": self._value_rate, "weight_decay": 0.0})
        return optimizer

    @property
    def _value_rate(self) -> float:
        given = self.config.value_learning_rate
        return 10 * self.config.learning_rate if given is None else given


_logger = logging.getLogger(__name__)


class OnlineDPOTrainer(OnlineTrainer[OnlineDPOConfig]):
    """Online Direct Preference Optimization with an engine that provably holds the policy's weights.

    Example:
        ```python
        def short(completions, **columns):
            return [-float(len(text)) for text in completions]

        config = OnlineDPOConfig(output_dir="out", max_steps=20, max_new_tokens=64)
        trainer = OnlineDPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=short, args=config, train_dataset=dataset)
        trainer.train()
        trainer.end()
        ```

    Args:
        ref_model: the reference model; by default a copy of the policy at the start of training.
        judge: a pairwise judge instead of reward functions (`lockstep.rollouts.judges`).
        data_collator, compute_metrics, preprocess_logits_for_metrics: arguments of TRL's trainer that are not
            supported; a value other than None is refused by name.
        tools, rollout_func, environment_factory, agent: as in `OnlineTrainer`. TRL's Online DPO has none.

    The order of the arguments is TRL's. Other arguments and errors: `lockstep.run.trainers.online.OnlineTrainer`.
    """

    config_class = OnlineDPOConfig
    method = "Online DPO"
    objective_class = OnlineDPOObjective

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: PreTrainedModel | None = None,
        reward_funcs: Given | list[Given] | None = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Data | None = None,
        eval_dataset: Data | Mapping[str, Data] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: ProcessingClasses = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        *,
        judge: Any = None,
        engine: Engine | None = None,
        quantization_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        agent: AgentFunction | str | None = None,
    ) -> None:
        self._judge = judge
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            agent=agent,
            engine=engine,
            quantization_config=quantization_config,
            ref_model=ref_model,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def rehearse(self, reward_funcs: Any, dataset: Dataset) -> None:
        if self._judge is None:
            super().rehearse(reward_funcs, dataset)
        else:
            rehearse_judge(self._judge, dataset, self.config)

    def scorer(self, reward_funcs: Any, processing_classes: Any) -> Scorer:
        path = self.config.reward_model_path
        if reward_funcs is not None and path is not None and self.ranks.owner:
            _logger.warning(f"reward_model_path={path!r} has no effect: reward_funcs are given")
        given = {
            "judge": self._judge,
            "reward_funcs": reward_funcs,
            "reward_model_path": path if reward_funcs is None else None,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)} all say which completion is better; give one of them")
        if self._judge is None:
            return super().scorer(path if reward_funcs is None else reward_funcs, processing_classes)
        if self.rollout_tools is not None and self.rollout_tools.reward_names:
            name = self.rollout_tools.reward_names[0]
            raise InputError(f"judge and the reward of {name} both compare completions; leave one out")
        if processing_classes is not None or self.config.reward_weights is not None:
            raise InputError(
                "reward_weights and reward_processing_classes are of reward functions; a judge has none"
            )
        if self.config.missing_eos_penalty is not None:
            raise InputError(
                "missing_eos_penalty is taken off a reward, and a judge gives none; leave one of the two out"
            )
        return JudgeScorer(self._judge, self.config.reward_timeout)
