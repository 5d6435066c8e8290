"""REINFORCE++ (arXiv 2501.03262): no critic, one normalisation for the whole generation, and perhaps a group baseline.

Without a baseline, a token's advantage is the sum of the rewards that follow it: the completion's reward at its end,
minus the KL to the reference model at every token. With `baseline="group"` the group's mean is first subtracted from
the reward, and the KL is in the loss (k2 estimator), as in OpenRLHF. In both cases all advantages of a generation
together are scaled to mean 0 and standard deviation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.algorithms.advantages import compared, group_advantages, rewards_to_go, whiten
from lockstep.algorithms.corrections import k1, k2
from lockstep.algorithms.losses import token_weights
from lockstep.algorithms.segments import Segments
from lockstep.config.documented import documented
from lockstep.config.option import Bounds, option
from lockstep.config.run import GroupConfig
from lockstep.errors import InputError
from lockstep.learn.methods.objective import Objective, Tally, TokenBatch, clipped_tokens
from lockstep.learn.sequence import TrainingSequence, column
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.arrays import cut, reals


@documented
@dataclass
class ReinforcePPConfig(GroupConfig):
    """Configuration of `ReinforcePPTrainer`.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    num_generations: int = option(1, "Completions per prompt; at least 2 with baseline=group.")
    beta: float = option(0.01, "Weight of the KL to the reference model.")
    gamma: float = option(
        1.0, "Discount of a reward, per token before it.", group="method", bounds=Bounds(0, 1)
    )
    baseline: Literal["none", "group"] = option(
        "none", "Baseline that is subtracted from a reward first.", group="method"
    )

    @property
    def least_group(self) -> int:
        return 2 if self.baseline == "group" else 1

    def __post_init__(self) -> None:
        if self.baseline not in ("none", "group"):
            raise InputError(f"baseline={self.baseline!r}; it must be none or group")
        super().__post_init__()


class ReinforcePPObjective(Objective[ReinforcePPConfig]):
    """Advantages over a whole generation, and a clipped loss per token."""

    definition = "reinforce++"

    @property
    def kl_in_reward(self) -> bool:
        return self.uses_reference and self.config.baseline == "none"

    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        config = self.config
        rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
        learned = ~torch.cat(rewards).isnan()
        if config.baseline == "group":
            # A completion without another scored one in its group has no baseline, and is left out.
            learned = torch.cat(compared(rewards))
            rewards = group_advantages(rewards, "none")
        learned &= ~torch.tensor([self.is_masked(rollout) for group in groups for rollout in group.rollouts])
        segments = Segments(torch.tensor([s.length for s in sequences]))
        divergence = torch.zeros(int(segments.lengths.sum()), dtype=torch.float64)
        if self.kl_in_reward:
            divergence = k1(*(column(sequences, name, torch.float64) for name in ("old_logps", "ref_logps")))
        flat_rewards = torch.cat(rewards).nan_to_num(0.0)
        to_go = rewards_to_go(flat_rewards, divergence, config.beta, segments, config.gamma)
        tokens = segments.spread(learned.float()) > 0
        advantages = reals(torch.where(tokens, whiten(to_go, tokens), 0.0).numpy())
        parts = cut(advantages, segments.lengths.numpy())
        return [s.but(advantages=part) for s, part in zip(sequences, parts, strict=True)]

    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return token_weights(lengths, "dapo", self.config.max_completion_length)

    def has_gradient(self, sequence: TrainingSequence) -> bool:
        in_loss = self.uses_reference and self.config.baseline == "group"
        return super().has_gradient(sequence) or (in_loss and sequence.weight != 0.0)

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        loss = clipped_tokens(self, batch, tally)
        if self.uses_reference:
            ref_logps = batch.pack.column("ref_logps")
            tally.mean("kl", k1(batch.logps.detach(), ref_logps))
            if self.config.baseline == "group":
                loss = loss + self.config.beta * k2(batch.logps, ref_logps)
        return (loss * batch.weights).sum()
