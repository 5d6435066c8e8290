"""GRPO and the losses of its family (arXiv 2402.03300 and the papers named in `lockstep.algorithms`), with TRL's constructor.

docs/reference/migrating-from-trl.md lists the differences to the papers and to TRL, with reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.advantages import group_advantages, normalised_reward_advantages, varies
from lockstep.algorithms.divergence import k3
from lockstep.algorithms.masks import high_entropy_mask, off_policy_mask
from lockstep.algorithms.policy_loss import (
    TokenLoss,
    cispo_loss,
    clipped_policy_loss,
    importance_ratios,
    prompt_weights,
    sapo_loss,
    token_weights,
)
from lockstep.algorithms.sequence_loss import vespo_loss
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.arrays import cut, flags
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.entropy_bonus import EntropyBonus
from lockstep.training.methods.grpo_config import GRPOConfig
from lockstep.training.methods.objective import (
    Entropies,
    Objective,
    Tally,
    TokenBatch,
    note_clipping,
    scores_by_function,
    with_one_advantage,
)

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class GRPOObjective(Objective[GRPOConfig]):
    """Advantages relative to the group, and a clipped or reweighted policy loss with optional KL and entropy terms."""

    definition = "grpo"

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self._bonus = EntropyBonus(config)
        self.entropy_gradient = self._bonus.used

    @property
    def scores_first(self) -> bool:
        # The threshold is a quantile of the whole step's entropies.
        return self.config.top_entropy_quantile < 1.0

    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        config = self.config
        if config.multi_objective_aggregation == "normalize_then_sum":
            scores, weights = scores_by_function(groups, config.reward_weights)
            advantages = normalised_reward_advantages(scores, weights)
        else:
            # The rewards of a filtered group are left out of the batch's standard deviation.
            rewards = [
                torch.tensor(group.rewards, dtype=torch.float32) * (torch.nan if self.filtered(group) else 1.0)
                for group in groups
            ]
            advantages = group_advantages(rewards, config.scale_rewards)  # type: ignore[arg-type]
        return with_one_advantage(sequences, advantages)

    def filtered(self, group: RolloutGroup) -> bool:
        return self.config.filter_zero_variance and not varies(group.rewards)

    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        if self.config.average_by_prompt:
            return prompt_weights(lengths, groups)
        return token_weights(lengths, self.config.loss_type, self.config.max_completion_length)

    def has_gradient(self, sequence: TrainingSequence) -> bool:
        more = self.uses_reference or self.entropy_gradient
        return sequence.weight != 0.0 if more else super().has_gradient(sequence)

    def prepare_step(self, sequences: Sequence[TrainingSequence], entropies: Entropies) -> list[TrainingSequence]:
        share, found = self.config.top_entropy_quantile, list(sequences)
        learned = [s for s in sequences if s.weight != 0.0]
        if share < 1.0 and learned:
            # One threshold for the whole step: a threshold per micro-batch would depend on how the step is split.
            by_name = entropies(learned)
            flat = torch.from_numpy(np.concatenate([by_name[s.name] for s in learned]))
            parts = cut(flags(high_entropy_mask(flat, share).numpy()), [s.length for s in learned])
            masks = {s.name: part for s, part in zip(learned, parts, strict=True)}
            found = [
                s.but(kept=masks[s.name] if s.name in masks else flags(np.zeros(s.length, np.bool_))) for s in sequences
            ]
        self._bonus.begin_step(found)
        return found

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        config = self.config
        ratios = importance_ratios(batch.logps, batch.old_logps, batch.segments, config.importance_sampling_level)
        correction, kept = self.correction(batch), batch.kept()
        token = self._policy_loss(batch, ratios, correction, tally)
        if config.loss_type in _CLIPPED:
            note_clipping(batch, token, tally, by_sequence=config.importance_sampling_level == "sequence")
        loss = token.loss * kept
        if config.off_policy_mask_threshold is not None:
            # This includes both the numerical difference between engine and trainer and the change of the policy since sampling.
            loss = loss * off_policy_mask(
                batch.logps,
                batch.behaviour_logps,
                batch.advantages,
                batch.segments,
                config.off_policy_mask_threshold,
            )
        if correction is not None and config.loss_type != "vespo":
            loss = loss * correction
        if self.uses_reference:
            divergence = k3(batch.logps, batch.pack.column("ref_logps"))
            if config.use_bias_correction_kl:
                divergence = divergence * ratios
            tally.mean("kl", divergence)
            loss = loss + config.beta * divergence
        total = (loss * batch.weights).sum()
        if self.entropy_gradient:
            tally.later(total, lambda loss: tally.mean("_policy_loss", float(loss), 0))
            total = total - self._bonus.share(batch.entropies, kept, tally)
        return total

    def _policy_loss(
        self, batch: TokenBatch, ratios: torch.Tensor, correction: torch.Tensor | None, tally: Tally
    ) -> TokenLoss:
        config = self.config
        if config.loss_type in _CLIPPED:
            return clipped_policy_loss(ratios, batch.advantages, config.epsilon, config.clip_high, config.delta)
        if config.loss_type == "cispo":
            token = cispo_loss(ratios, batch.logps, batch.advantages, config.clip_high)
            clipped = token.high_clipped.float()
            of_completions = config.importance_sampling_level == "sequence"
            tally.mean("cispo_clip_ratio", batch.segments.means(clipped) if of_completions else clipped)
            return token
        if config.loss_type == "sapo":
            return sapo_loss(ratios, batch.advantages, config.sapo_temperature_pos, config.sapo_temperature_neg)
        token, phi = vespo_loss(
            batch.logps,
            batch.old_logps,
            batch.advantages,
            batch.segments,
            correction,
            config.vespo_k_pos,
            config.vespo_lambda_pos,
            config.vespo_k_neg,
            config.vespo_lambda_neg,
            "sequence" if config.vllm_importance_sampling_mode.startswith("sequence") else "token",
        )
        tally.mean("vespo/phi_seq_mean", phi)
        return token

    def finish_step(self, tally: Tally) -> dict[str, float]:
        if not self._bonus.used:
            return {}
        return {"policy_loss": tally.total("_policy_loss"), "entropy_coef": self._bonus.finish_step(tally)}

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy bonus, as the last step has left it."""
        return self._bonus.coefficient

    def set_entropy_coef(self, value: float) -> float:
        """Give the entropy bonus another weight, from the next micro-batch on. Returns the earlier one."""
        before, self._bonus.coefficient = self._bonus.coefficient, value
        return before

    def state(self) -> dict[str, Any]:
        return self._bonus.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._bonus.load_state(state)
