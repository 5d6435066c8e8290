"""One generation, cut into the micro-batches that learn from it. Pure functions of scored groups and the config.

Comes from: `rollouts/`. Goes to: `training/update.py`, one micro-batch after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.advantages import group_advantages
from lockstep.algorithms.policy_loss import token_weights
from lockstep.engines.protocol import Completion, Sampling
from lockstep.rollouts.group import RolloutGroup
from lockstep.training.config import GRPOConfig
from lockstep.training.packing import TrainingSequence


@dataclass(frozen=True, slots=True)
class Generation:
    """Scored groups and what is to be learned from them.

    Attributes:
        version: weight version that sampled every token.
        groups: the rollouts, by prompt.
        micro_batches: `steps_per_generation` lists of sequences, in the order of groups and samples.
    """

    version: int
    groups: tuple[RolloutGroup, ...]
    micro_batches: tuple[tuple[TrainingSequence, ...], ...]

    @property
    def completions(self) -> list[Completion]:
        """Every completion, as the engine answered it."""
        return [rollout.completion for group in self.groups for rollout in group.rollouts]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the engine sampled, counted at the engine's answers and not at what was made of them."""
        return sum(len(c.token_ids) for c in self.completions)

    def tokens_of_step(self, last_part: int, accumulated: int) -> int:
        """Tokens of the micro-batches of the optimizer step that ends with `last_part`."""
        parts = range(last_part + 1 - accumulated, last_part + 1)
        batches = [self.micro_batches[part % len(self.micro_batches)] for part in parts]
        return sum(len(s.completion_ids) for batch in batches for s in batch)

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(group.prompt.prompt_id for group in self.groups)

    def with_old_logps(self, old_logps: dict[str, tuple[float, ...]]) -> Generation:
        """The same generation, each sequence with the policy's log-probs at sampling time."""
        batches = tuple(tuple(replace(s, old_logps=old_logps[s.name]) for s in batch) for batch in self.micro_batches)
        return replace(self, micro_batches=batches)


def sampling_of(config: GRPOConfig) -> Sampling:
    """The distribution that a run samples from."""
    return Sampling(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        stop=tuple(config.stop_strings or ()),
    )


def prepare_generation(groups: Sequence[RolloutGroup], config: GRPOConfig, version: int) -> Generation:
    """Advantages, loss weights and micro-batches of a generation.

    Weights are normalised over each whole optimizer step, whatever its number of micro-batches.
    """
    rewards = [torch.tensor(group.rewards, dtype=torch.float32) for group in groups]
    advantages = torch.cat(group_advantages(rewards, config.scale_rewards)).tolist()  # type: ignore[arg-type]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    size = config.per_device_train_batch_size
    step_size = size * config.gradient_accumulation_steps
    weights: list[float] = []
    for start in range(0, len(rollouts), step_size):
        kept = [
            0
            if config.mask_truncated_completions and r.completion.finish_reason == "length"
            else len(r.completion.token_ids)
            for r in rollouts[start : start + step_size]
        ]
        lengths = torch.tensor(kept)
        per_token = token_weights(lengths, config.loss_type, config.max_completion_length)
        weights += torch.where(lengths > 0, per_token, 0.0).tolist()
    sequences = [
        TrainingSequence(
            name=str(rollout.completion.key),
            prompt_ids=rollout.completion.prompt_ids,
            completion_ids=rollout.completion.token_ids,
            behaviour_logps=rollout.completion.logprobs,
            advantage=advantage,
            weight=weight,
        )
        for rollout, advantage, weight in zip(rollouts, advantages, weights, strict=True)
    ]
    batches = tuple(tuple(sequences[i : i + size]) for i in range(0, len(sequences), size))
    return Generation(version, tuple(groups), batches)
