"""RLOO: REINFORCE with the mean reward of a prompt's other completions as baseline (arXiv 2402.14740).

The whole completion is the action: there is one ratio per completion, and the KL to the reference model is in its
reward. TRL's trainer does not use the engine's log-probs. Here they are proven, and weight each token's gradient as
in GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.algorithms.advantages import compared, leave_one_out_advantages, whiten
from lockstep.algorithms.corrections import k1
from lockstep.algorithms.losses import TokenLoss, clipped_policy_loss
from lockstep.config.documented import documented
from lockstep.config.option import option
from lockstep.config.run import GroupConfig
from lockstep.errors import InputError
from lockstep.learn.methods.objective import Objective, Tally, TokenBatch, note_clipping, with_one_advantage
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.group import RolloutGroup


@documented
@dataclass
class RLOOConfig(GroupConfig):
    """Configuration of `RLOOTrainer`.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    num_generations: int = option(2, "Completions per prompt (the size of a group).")
    beta: float = option(0.05, "Weight of the KL to the reference model in the reward.")
    normalize_advantages: bool = option(
        False, "Scale a generation's advantages to mean 0 and standard deviation 1.", group="method"
    )
    reward_clip_range: list[float] | None = option(None, "Bounds of a reward: two numbers.", group="reward")

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.reward_clip_range
        if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
            raise InputError(f"reward_clip_range={bounds}; it must be two numbers, the lower one first")


class RLOOObjective(Objective[RLOOConfig]):
    """Leave-one-out advantages of rewards with a KL penalty, and the clipped loss per completion."""

    definition = "rloo"

    @property
    def kl_in_reward(self) -> bool:
        return self.uses_reference

    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        config = self.config
        # In float64: if rewards are equal, the differences of the penalties that remain are small.
        rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
        if config.reward_clip_range is not None:
            low, high = config.reward_clip_range
            rewards = [group.clamp(low, high) for group in rewards]
        if self.uses_reference:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            # A masked completion has no penalty, as in TRL.
            paid = [
                0.0 if self.is_masked(r) else _divergence(s) for r, s in zip(rollouts, sequences, strict=True)
            ]
            penalties = torch.tensor(paid, dtype=torch.float64).split([len(group) for group in rewards])
            rewards = [group - config.beta * kl for group, kl in zip(rewards, penalties, strict=True)]
        advantages = leave_one_out_advantages(rewards)
        if config.normalize_advantages:
            mask = torch.cat(compared(rewards))
            white = torch.where(mask, whiten(torch.cat(advantages), mask), 0.0)
            advantages = list(white.split([len(group) for group in rewards]))
        return with_one_advantage(sequences, advantages)

    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return torch.full((len(lengths),), 1.0 / len(lengths))

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        config, segments = self.config, batch.segments
        drift = batch.logps - batch.old_logps
        correction = self.correction(batch)
        if correction is not None:
            # The value of the ratio does not change. Each token's gradient in it is multiplied by the token's weight.
            drift = drift.detach() + correction * (batch.logps - batch.logps.detach())
        ratios = torch.exp(segments.sums(drift))
        token = clipped_policy_loss(ratios, batch.sequence_advantages, config.epsilon, config.clip_high)
        spread = TokenLoss(
            *(segments.spread(x.float()) for x in (token.loss, token.low_clipped, token.high_clipped))
        )
        note_clipping(batch, spread, tally, by_sequence=True)
        if self.uses_reference:
            tally.mean("kl", k1(batch.old_logps, batch.pack.column("ref_logps")))
        return (token.loss * segments.means(batch.weights)).sum()


def _divergence(sequence: TrainingSequence) -> float:
    """Log-prob of a completion under the policy that sampled it, minus its log-prob under the reference model."""
    assert sequence.old_logps is not None
    assert sequence.ref_logps is not None
    return sum(sequence.old_logps.tolist()) - sum(sequence.ref_logps.tolist())
