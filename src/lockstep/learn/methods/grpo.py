"""GRPO and the losses of its family: configuration, loss, and entropy bonus.

The papers are arXiv 2402.03300 and those named in `lockstep.algorithms`. docs/reference/migrating-from-trl.md lists the
differences to the papers and to TRL, with reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from lockstep.algorithms.advantages import (
    ScaleRewards,
    group_advantages,
    normalised_reward_advantages,
    varies,
)
from lockstep.algorithms.corrections import high_entropy_mask, k3, off_policy_mask
from lockstep.algorithms.losses import (
    ImportanceLevel,
    LossType,
    TokenLoss,
    cispo_loss,
    clipped_policy_loss,
    importance_ratios,
    prompt_weights,
    sapo_loss,
    token_weights,
    vespo_loss,
)
from lockstep.config.documented import documented
from lockstep.config.option import SHARE, Bounds, Part, option
from lockstep.config.run import GroupConfig
from lockstep.errors import InputError
from lockstep.learn.methods.objective import (
    Entropies,
    Objective,
    Tally,
    TokenBatch,
    note_clipping,
    scores_by_function,
    with_one_advantage,
)
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.group import RolloutGroup
from lockstep.start_up import TRL_LOGGER
from lockstep.tokens.arrays import cut, flags

_logger = logging.getLogger(__name__)


@documented
@dataclass
class GRPOConfig(GroupConfig):
    """Configuration of `GRPOTrainer`.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    loss_type: LossType = option(
        "dapo",
        "The loss of a token, and how tokens are averaged; see docs/reference/methods.md.",
        group="method",
        common=True,
        part=Part.LEARNING,
    )
    importance_sampling_level: ImportanceLevel = option(
        "token",
        "One ratio per token, or one per completion (GSPO).",
        group="method",
        only_with="several_steps_or_kl",
        part=Part.LEARNING,
    )
    delta: float | None = option(
        None,
        "Bound of the unclipped ratio (dual clipping); sensibly above 1 + epsilon.",
        group="method",
        bounds=Bounds(0, above=True, infinite=True),
        only_with=("several_steps_or_below_1", "clip"),
        part=Part.LEARNING,
    )
    sapo_temperature_pos: float = option(
        1.0,
        "SAPO's temperature for positive advantages.",
        group="method",
        bounds=Bounds(0, above=True),
        only_with="sapo",
        part=Part.LEARNING,
    )
    sapo_temperature_neg: float = option(
        1.05,
        "SAPO's temperature for negative advantages.",
        group="method",
        bounds=Bounds(0, above=True),
        only_with="sapo",
        part=Part.LEARNING,
    )
    vespo_k_pos: float = option(
        2.0,
        "VESPO's exponent for positive advantages.",
        group="method",
        only_with="vespo",
        part=Part.LEARNING,
    )
    vespo_lambda_pos: float = option(
        3.0,
        "VESPO's decay for positive advantages.",
        group="method",
        only_with="vespo",
        part=Part.LEARNING,
    )
    vespo_k_neg: float = option(
        3.0,
        "VESPO's exponent for negative advantages.",
        group="method",
        only_with="vespo",
        part=Part.LEARNING,
    )
    vespo_lambda_neg: float = option(
        2.0,
        "VESPO's decay for negative advantages.",
        group="method",
        only_with="vespo",
        part=Part.LEARNING,
    )
    use_bias_correction_kl: bool = option(
        True,
        "Weight the KL term by the importance ratio, which makes its gradient unbiased.",
        group="method",
        only_with="kl",
        part=Part.LEARNING,
    )
    scale_rewards: str = option(
        "group",
        "`group`, `batch`, `advantages` (ScaleRL's) or `none`.",
        group="method",
        also=("bool",),
        only_with="summed_rewards",
        part=Part.LEARNING,
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "Sum the rewards, or normalise each by itself first (GDPO).",
        group="method",
        part=Part.LEARNING,
    )
    average_by_prompt: bool = option(
        False,
        "Average over each prompt's tokens, then over prompts, instead of as loss_type does (ScaleRL).",
        group="method",
        part=Part.LEARNING,
    )
    filter_zero_variance: bool = option(
        False,
        "Leave groups with equal rewards out of the step, including its averages and standard deviation.",
        group="method",
        part=Part.LEARNING,
    )
    top_entropy_quantile: float = option(
        1.0,
        "Share of a step's tokens, those with the highest entropy, that the policy term learns from.",
        group="method",
        bounds=SHARE,
        part=Part.LEARNING,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", group="method", part=Part.LEARNING)
    use_adaptive_entropy: bool = option(
        False,
        "Raise entropy_coef while entropy is at or below entropy_target, else lower it.",
        group="method",
        part=Part.LEARNING,
    )
    entropy_coef_min: float = option(
        0.0,
        "Smallest coefficient of the adaptive bonus.",
        group="method",
        only_with="adaptive_entropy",
        part=Part.LEARNING,
    )
    entropy_coef_max: float = option(
        1.0,
        "Largest coefficient of the adaptive bonus.",
        group="method",
        only_with="adaptive_entropy",
        part=Part.LEARNING,
    )
    entropy_coef_delta: float = option(
        0.005,
        "Change of the adaptive coefficient per step.",
        group="method",
        only_with="adaptive_entropy",
        part=Part.LEARNING,
    )
    entropy_target: float = option(
        0.2,
        "Target entropy of the adaptive bonus, in nats per token.",
        group="method",
        only_with="adaptive_entropy",
        part=Part.LEARNING,
    )
    off_policy_mask_threshold: float | None = option(
        None,
        "Drop completions with a negative advantage whose mean log-prob has fallen by more than this.",
        group="method",
        bounds=Bounds(infinite=True),
        part=Part.LEARNING,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale_rewards = {True: "group", False: "none", "True": "group", "False": "none"}.get(
            self.scale_rewards, self.scale_rewards
        )
        for name, values in (
            ("scale_rewards", get_args(ScaleRewards)),
            ("loss_type", get_args(LossType)),
            ("importance_sampling_level", get_args(ImportanceLevel)),
            ("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum")),
        ):
            if getattr(self, name) not in values:
                raise InputError(f"{name}={getattr(self, name)!r}; it must be one of {', '.join(values)}")
        if self.filter_zero_variance and self.multi_objective_aggregation == "normalize_then_sum":
            raise InputError(
                "filter_zero_variance compares a group's summed rewards; "
                "multi_objective_aggregation='normalize_then_sum' sums none"
            )
        if self.entropy_coef_min > self.entropy_coef_max:
            raise InputError(
                f"entropy_coef_min={self.entropy_coef_min} is above entropy_coef_max={self.entropy_coef_max}"
            )
        if self.process_index == 0:
            self._warn_of_the_level()

    def _warn_of_the_level(self) -> None:
        """Say where ratios per completion and a loss do not belong together, as TRL does."""
        level, loss = self.importance_sampling_level, self.loss_type
        said = None
        if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
            said = (
                f"loss_type={loss} sums tokens, which weights each sequence by its completion length; GSPO "
                "is loss_type=grpo"
            )
        elif level != "sequence" and loss == "luspo":
            said = "LUSPO's paper has ratios per completion: importance_sampling_level=sequence"
        elif level != "token" and loss == "vespo":
            said = "VESPO weighs completions itself: leave importance_sampling_level out"
        if said is not None:
            _logger.warning(f"importance_sampling_level={level}: {said}")
            TRL_LOGGER.warning(said)


_BONUS = "_bonus"


class EntropyBonus:
    """Coefficient × mean entropy over the tokens of an optimizer step that the policy learns from.

    After each step, an adaptive coefficient rises if the step's mean entropy is at or below the target, and falls
    otherwise, within its bounds. It is applied only if the last step's entropy was at or below the target (TRL 1.16's
    controller).
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.used = config.entropy_coef != 0.0 or config.use_adaptive_entropy
        self._config = config
        self.coefficient = config.entropy_coef
        self._last_entropy = float("inf")
        self._tokens = 0

    def begin_step(self, sequences: Sequence[TrainingSequence]) -> None:
        """Count the step's tokens, over all ranks, that the policy learns from."""
        self._tokens = sum(
            int(np.count_nonzero(s.kept)) if s.kept is not None else s.length
            for s in sequences
            if s.weight != 0.0
        )

    def share(self, entropies: torch.Tensor, kept: torch.Tensor, tally: Tally) -> torch.Tensor:
        """A pack's share of the bonus; a scalar. `kept` is (N,): 1 for tokens that the policy learns from, else 0."""
        learned = entropies * kept
        both = torch.stack([learned.detach().sum(), kept.sum().to(learned.dtype)])
        tally.later(both, lambda sums: tally.mean(_BONUS, float(sums[0]), int(sums[1])))
        low = self._last_entropy <= self._config.entropy_target
        coefficient = self.coefficient if low or not self._config.use_adaptive_entropy else 0.0
        return coefficient * learned.sum() / max(self._tokens, 1)

    def finish_step(self, tally: Tally) -> float:
        """Update the coefficient with the step's entropies over all ranks, and return it."""
        config, tokens = self._config, tally.count(_BONUS)
        if config.use_adaptive_entropy and tokens:
            self._last_entropy = tally.total(_BONUS) / tokens
            up = self._last_entropy <= config.entropy_target
            moved = self.coefficient + (config.entropy_coef_delta if up else -config.entropy_coef_delta)
            self.coefficient = min(max(moved, config.entropy_coef_min), config.entropy_coef_max)
        return self.coefficient

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; empty if the coefficient is fixed."""
        if not self._config.use_adaptive_entropy:
            return {}
        return {"entropy_coef": self.coefficient, "last_entropy": self._last_entropy}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint's state."""
        self.coefficient = state.get("entropy_coef", self.coefficient)
        self._last_entropy = state.get("last_entropy", self._last_entropy)


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
                torch.tensor(group.rewards, dtype=torch.float32)
                * (torch.nan if self.filtered(group) else 1.0)
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

    def prepare_step(
        self, sequences: Sequence[TrainingSequence], entropies: Entropies
    ) -> list[TrainingSequence]:
        share, found = self.config.top_entropy_quantile, list(sequences)
        learned = [s for s in sequences if s.weight != 0.0]
        if share < 1.0 and learned:
            # One threshold for the whole step: a threshold per micro-batch would depend on how the step is split.
            by_name = entropies(learned)
            flat = torch.from_numpy(np.concatenate([by_name[s.name] for s in learned]))
            parts = cut(flags(high_entropy_mask(flat, share).numpy()), [s.length for s in learned])
            masks = {s.name: part for s, part in zip(learned, parts, strict=True)}
            found = [
                s.but(kept=masks[s.name] if s.name in masks else flags(np.zeros(s.length, np.bool_)))
                for s in sequences
            ]
        self._bonus.begin_step(found)
        return found

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        config = self.config
        level = config.importance_sampling_level
        ratios = importance_ratios(batch.logps, batch.old_logps, batch.segments, level)
        correction, kept = self.correction(batch), batch.kept()
        token = self._policy_loss(batch, ratios, correction, tally)
        if config.loss_type in _CLIPPED:
            note_clipping(batch, token, tally, by_sequence=level == "sequence")
        loss = token.loss * kept
        if config.off_policy_mask_threshold is not None:
            # It includes the difference between engine and trainer, and the change of the policy since sampling.
            columns = batch.logps, batch.behaviour_logps, batch.advantages
            loss = loss * off_policy_mask(*columns, batch.segments, config.off_policy_mask_threshold)
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
        advantages = batch.advantages
        if config.loss_type in _CLIPPED:
            return clipped_policy_loss(ratios, advantages, config.epsilon, config.clip_high, config.delta)
        if config.loss_type == "cispo":
            token = cispo_loss(ratios, batch.logps, advantages, config.clip_high)
            clipped = token.high_clipped.float()
            of_completions = config.importance_sampling_level == "sequence"
            tally.mean("cispo_clip_ratio", batch.segments.means(clipped) if of_completions else clipped)
            return token
        if config.loss_type == "sapo":
            return sapo_loss(ratios, advantages, config.sapo_temperature_pos, config.sapo_temperature_neg)
        token, phi = vespo_loss(
            batch.logps,
            batch.old_logps,
            advantages,
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
