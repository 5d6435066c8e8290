"""PPO (arXiv 1707.06347) with a value head on the policy's own trunk and generalised advantages (arXiv 1506.02438).

The head reads the hidden state before each token. So the forward that scores the tokens also gives the values, at
almost no cost. The reward is given at a completion's last token, and the KL to the reference model is subtracted at
every token, as in OpenRLHF.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.algorithms.advantages import clipped_value_loss, generalised_advantages, whiten
from lockstep.algorithms.corrections import k1
from lockstep.algorithms.losses import token_weights
from lockstep.algorithms.segments import Segments
from lockstep.config.documented import documented
from lockstep.config.option import Bounds, option
from lockstep.config.run import GroupConfig
from lockstep.learn.methods.objective import Objective, Tally, TokenBatch, clipped_tokens
from lockstep.learn.sequence import TrainingSequence, column
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.arrays import cut, flags, reals


@documented
@dataclass
class PPOConfig(GroupConfig):
    """Configuration of `PPOTrainer`.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    num_generations: int = option(1, "Completions per prompt.")
    beta: float = option(0.05, "Weight of the KL to the reference model in the reward.")
    gamma: float = option(1.0, "Discount per token.", group="method", bounds=Bounds(0, 1))
    lam: float = option(
        0.95, "Decay of the generalised advantage estimator.", group="method", bounds=Bounds(0, 1)
    )
    vf_coef: float = option(0.1, "Weight of the value loss.", group="method", bounds=Bounds(0))
    cliprange_value: float = option(
        0.2,
        "How far a value may move from its estimate at sampling time.",
        group="method",
        bounds=Bounds(0),
        only_with="several_steps",
    )
    value_learning_rate: float | None = option(
        None,
        "Learning rate of the value head; default: ten times learning_rate.",
        group="method",
        bounds=Bounds(0),
    )

    @property
    def least_group(self) -> int:
        return 1


class PPOObjective(Objective[PPOConfig]):
    """Generalised advantages, a clipped policy loss and a clipped value loss."""

    definition = "ppo"

    @property
    def kl_in_reward(self) -> bool:
        return self.uses_reference

    @property
    def scores_first(self) -> bool:
        # Advantages need values.
        return True

    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        config = self.config
        rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
        lengths = torch.tensor([s.length for s in sequences])
        segments = Segments(lengths)
        token_rewards = torch.zeros(int(lengths.sum()), dtype=torch.float64)
        if self.uses_reference:
            logps = (column(sequences, name, torch.float64) for name in ("old_logps", "ref_logps"))
            token_rewards = -config.beta * k1(*logps)
        written = lengths > 0
        token_rewards[(lengths.cumsum(0) - 1)[written]] += rewards.nan_to_num(0.0)[written]
        advantages, returns = generalised_advantages(
            token_rewards, column(sequences, "values", torch.float64), segments, config.gamma, config.lam
        )
        masked = torch.tensor([self.is_masked(rollout) for group in groups for rollout in group.rollouts])
        learned = segments.spread((~rewards.isnan() & ~masked).float()) > 0
        advantages = torch.where(learned, whiten(advantages, learned), 0.0)
        found = (reals(advantages.numpy()), reals(returns.numpy()), flags(learned.numpy()))
        columns = (cut(values, lengths.numpy()) for values in found)
        own = zip(sequences, *columns, strict=True)
        return [s.but(advantages=a, returns=r, kept=k) for s, a, r, k in own]

    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return token_weights(lengths, "dapo", self.config.max_completion_length)

    def has_gradient(self, sequence: TrainingSequence) -> bool:
        # The value head learns from every completion that has a reward, for any advantages.
        return sequence.weight != 0.0 and sequence.kept is not None and bool(np.any(sequence.kept))

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        config = self.config
        policy_loss = clipped_tokens(self, batch, tally)
        assert batch.values is not None
        old_values, returns = batch.pack.column("values"), batch.pack.column("returns")
        value_loss = clipped_value_loss(batch.values, old_values, returns, config.cliprange_value)
        tally.mean("loss/value", value_loss)
        tally.mean("value/mean", batch.values)
        tally.mean("value/returns", returns)
        if self.uses_reference:
            tally.mean("kl", k1(batch.logps.detach(), batch.pack.column("ref_logps")))
        return ((policy_loss + config.vf_coef * value_loss) * batch.weights).sum()
