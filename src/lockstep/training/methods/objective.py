"""What a method makes of scored rollouts: advantages, the weight of a token, and the loss of a pack.

Comes from: `training/step/generation.py` (scored groups) and `training/step/update.py` (packs that have been through the model).
Goes to: the trainers, one subclass a method. No objective knows which engine sampled, how sequences are packed, or on how many
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from lockstep.algorithms.corrections import importance_weights
from lockstep.algorithms.policy_loss import TokenLoss, clipped_policy_loss, importance_ratios
from lockstep.algorithms.segments import Segments
from lockstep.algorithms.tally import Tally
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.tokens.arrays import Reals, filled
from lockstep.training.batch.pack import Pack
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.forward.scoring import TokenScores

Config = TypeVar("Config", bound=OnlineConfig)
Scores = dict[str, Reals]
# Scores sequences with the policy as it is now: entropies by request name, on all ranks.
Entropies = Callable[[Sequence[TrainingSequence]], Scores]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A pack after its forward: N tokens of B completions, flat.

    Attributes:
        sequences: the B completions.
        segments: which token belongs to which.
        logps, entropies: (N,) under the policy, with gradient (entropies only where the objective asks for it).
        old_logps: (N,) the policy's at sampling time.
        behaviour_logps: (N,) the engine's.
        advantages, weights: (N,).
        pack: the columns that only some methods have.
        values: (N,) the critic's, with gradient, where there is one.
    """

    sequences: tuple[TrainingSequence, ...]
    segments: Segments
    logps: torch.Tensor
    entropies: torch.Tensor
    old_logps: torch.Tensor
    behaviour_logps: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    pack: Pack
    values: torch.Tensor | None = None

    @classmethod
    def of(cls, pack: Pack, scores: TokenScores) -> TokenBatch:
        """Put a pack's scores beside what its sequences bring."""
        moved = pack.sequences[0].old_logps is not None
        weights = torch.tensor([s.weight for s in pack.sequences], dtype=torch.float32, device=scores.logps.device)
        segments = Segments(pack.lengths)
        return cls(
            sequences=pack.sequences,
            segments=segments,
            logps=scores.logps,
            entropies=scores.entropies,
            # Where the policy has not moved, this very forward's.
            old_logps=pack.column("old_logps") if moved else scores.logps.detach(),
            behaviour_logps=pack.column("behaviour_logps"),
            advantages=pack.column("advantages"),
            weights=segments.spread(weights),
            pack=pack,
            values=scores.values,
        )

    @property
    def sequence_advantages(self) -> torch.Tensor:
        """(B,) advantage of each completion, for methods that have one for all of its tokens."""
        return self.segments.means(self.advantages)

    def kept(self) -> torch.Tensor:
        """(N,) 1 for the tokens that are learned from, else 0."""
        masked = any(s.kept is not None for s in self.sequences)
        return self.pack.column("kept") if masked else torch.ones_like(self.logps, requires_grad=False)


class Objective(ABC, Generic[Config]):
    """A method, as functions of rollouts and tokens.

    Attributes:
        entropy_gradient: the loss moves entropies.
        config: the run's.
        epoch: passes over the training data that are complete.
    """

    epoch = 0
    entropy_gradient = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def uses_reference(self) -> bool:
        """Whether the reference model's log-probs are needed."""
        return self.config.beta != 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantages need the log-probs of policy and reference."""
        return False

    @property
    def scores_first(self) -> bool:
        """Whether what is learned depends on the policy's own scores, so that rollouts are scored before they are cut up."""
        return self.kl_in_reward

    @abstractmethod
    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        """Sequences with their advantages.

        Args:
            groups: the whole generation's, over all ranks.
            sequences: one a rollout, in the order of groups and samples.
        """

    @abstractmethod
    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Weight of a token of each completion of one optimizer step, over all ranks.

        Args:
            lengths: (B,) in tokens, 0 where masked.
            groups: (B,) place of the completion's group within the generation.

        Returns:
            (B,) weights.
        """

    @abstractmethod
    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        """A pack's share of the optimizer step's loss; a scalar. What is logged goes to `tally`."""

    def has_gradient(self, sequence: TrainingSequence) -> bool:
        """Whether a sequence can move the policy; one that cannot is scored without gradient."""
        return sequence.weight != 0.0 and bool(np.any(sequence.advantages))

    def is_masked(self, rollout: Rollout) -> bool:
        """Whether a rollout has no part in the loss: it was cut at the length limit and such ones are masked."""
        masks = getattr(self.config, "mask_truncated_completions", False)
        return masks and rollout.completion.finish_reason == "length"

    def filtered(self, group: RolloutGroup) -> bool:
        """Whether a group counts in no step: neither its completions nor their number."""
        return False

    def prepare_step(self, sequences: Sequence[TrainingSequence], entropies: Entropies) -> list[TrainingSequence]:
        """Sequences of one optimizer step, over all ranks, just before its first forward.

        Args:
            entropies: asked by objectives that score first.
        """
        return list(sequences)

    def finish_step(self, tally: Tally) -> dict[str, float]:
        """Told the step's numbers over all ranks, before the optimizer; gives further ones to log."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, in JSON types."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds."""

    def correction(self, batch: TokenBatch) -> torch.Tensor | None:
        """(N,) weights for what engine and trainer differ by, once the gap has passed; None where it is switched off."""
        config = self.config
        if not config.vllm_importance_sampling_correction:
            return None
        return importance_weights(
            batch.old_logps,
            batch.behaviour_logps,
            batch.segments,
            config.vllm_importance_sampling_mode,
            config.vllm_importance_sampling_clip_min,
            config.vllm_importance_sampling_clip_max,
        )


def scores_by_function(
    groups: Sequence[RolloutGroup], weights: Sequence[float] | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each group's (G, K) scores, NaN where a function gave none, and the (K,) weights of the functions.

    In float64: in float32 a group whose scores all agree would be left with an advantage of the last bit.
    """
    names = list(groups[0].rollouts[0].scores)
    nan = float("nan")
    scores = [
        torch.tensor(
            [[nan if (score := r.scores[n]) is None else float(score) for n in names] for r in group.rollouts],
            dtype=torch.float64,
        )
        for group in groups
    ]
    return scores, torch.tensor(list(weights) if weights is not None else [1.0] * len(names))


def clipped_tokens(objective: Objective[Any], batch: TokenBatch, tally: Tally) -> torch.Tensor:
    """(N,) PPO's clipped loss, one ratio a token, corrected; of methods whose advantages are the tokens' own."""
    ratios = importance_ratios(batch.logps, batch.old_logps, batch.segments, "token")
    token = clipped_policy_loss(ratios, batch.advantages, objective.config.epsilon, objective.config.clip_high)
    note_clipping(batch, token, tally)
    correction = objective.correction(batch)
    return token.loss if correction is None else token.loss * correction


def with_one_advantage(
    sequences: Sequence[TrainingSequence], advantages: Sequence[torch.Tensor]
) -> list[TrainingSequence]:
    """Sequences with one advantage a completion, given in groups, for each of its tokens."""
    values = torch.cat(list(advantages)).tolist()
    return [replace(s, advantages=filled(v, s.length)) for s, v in zip(sequences, values, strict=True)]


@torch.no_grad()
def note_clipping(batch: TokenBatch, token: TokenLoss, tally: Tally, *, by_sequence: bool = False) -> None:
    """Log how much was clipped, under TRL's names.

    Args:
        by_sequence: means are over completions, each of which has one ratio, and not over tokens.
    """
    low, high = token.low_clipped.float(), token.high_clipped.float()
    per_low, per_high = batch.segments.means(low), batch.segments.means(high)
    for name, values, means in (
        ("low_mean", low, per_low),
        ("high_mean", high, per_high),
        ("region_mean", low + high, per_low + per_high),
    ):
        tally.mean(f"clip_ratio/{name}", means if by_sequence else values)
    tally.low("clip_ratio/low_min", per_low)
    tally.high("clip_ratio/high_max", per_high)
