"""The configuration of GRPO and its variants, with TRL's names: loss types, trust regions, entropy, scaling of rewards."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal, get_args

from lockstep.algorithms.advantages import ScaleRewards
from lockstep.algorithms.policy_loss import ImportanceLevel, LossType
from lockstep.errors import InputError
from lockstep.terminal_log import TRL_LOGGER
from lockstep.training.config.documented import documented
from lockstep.training.config.fields.trl import doc
from lockstep.training.config.group_config import GroupConfig

_logger = logging.getLogger(__name__)


@documented
@dataclass
class GRPOConfig(GroupConfig):
    """Configuration of `GRPOTrainer`.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    loss_type: LossType = field(
        default="dapo", metadata=doc("The loss of a token, and how tokens are averaged; see docs/reference/methods.md.")
    )
    importance_sampling_level: ImportanceLevel = field(
        default="token", metadata=doc("One ratio per token, or one per completion (GSPO).")
    )
    delta: float | None = field(
        default=None, metadata=doc("Bound of the unclipped ratio (dual clipping); sensibly above 1 + epsilon.")
    )
    sapo_temperature_pos: float = field(default=1.0, metadata=doc("SAPO's temperature for positive advantages."))
    sapo_temperature_neg: float = field(default=1.05, metadata=doc("SAPO's temperature for negative advantages."))
    vespo_k_pos: float = field(default=2.0, metadata=doc("VESPO's exponent for positive advantages."))
    vespo_lambda_pos: float = field(default=3.0, metadata=doc("VESPO's decay for positive advantages."))
    vespo_k_neg: float = field(default=3.0, metadata=doc("VESPO's exponent for negative advantages."))
    vespo_lambda_neg: float = field(default=2.0, metadata=doc("VESPO's decay for negative advantages."))
    use_bias_correction_kl: bool = field(
        default=True, metadata=doc("Weight the KL term by the importance ratio, which makes its gradient unbiased.")
    )
    scale_rewards: str = field(default="group", metadata=doc("`group`, `batch`, `advantages` (ScaleRL's) or `none`."))
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = field(
        default="sum_then_normalize", metadata=doc("Sum the rewards, or normalise each by itself first (GDPO).")
    )
    average_by_prompt: bool = field(
        default=False,
        metadata=doc("Average over each prompt's tokens, then over prompts, instead of as loss_type does (ScaleRL)."),
    )
    filter_zero_variance: bool = field(
        default=False,
        metadata=doc("Leave groups with equal rewards out of the step, including its averages and standard deviation."),
    )
    top_entropy_quantile: float = field(
        default=1.0,
        metadata=doc("Share of a step's tokens, those with the highest entropy, that the policy term learns from."),
    )
    entropy_coef: float = field(default=0.0, metadata=doc("Weight of the entropy bonus."))
    use_adaptive_entropy: bool = field(
        default=False, metadata=doc("Raise entropy_coef while entropy is at or below entropy_target, else lower it.")
    )
    entropy_coef_min: float = field(default=0.0, metadata=doc("Smallest coefficient of the adaptive bonus."))
    entropy_coef_max: float = field(default=1.0, metadata=doc("Largest coefficient of the adaptive bonus."))
    entropy_coef_delta: float = field(default=0.005, metadata=doc("Change of the adaptive coefficient per step."))
    entropy_target: float = field(default=0.2, metadata=doc("Target entropy of the adaptive bonus, in nats per token."))
    off_policy_mask_threshold: float | None = field(
        default=None,
        metadata=doc("Drop completions with a negative advantage whose mean log-prob has fallen by more than this."),
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
                "filter_zero_variance compares a group's summed rewards; multi_objective_aggregation='normalize_then_sum' sums none"
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
            said = f"loss_type={loss} sums tokens, which weights each sequence by its completion length; GSPO is loss_type=grpo"
        elif level != "sequence" and loss == "luspo":
            said = "LUSPO's paper has ratios per completion: importance_sampling_level=sequence"
        elif level != "token" and loss == "vespo":
            said = "VESPO weighs completions itself: leave importance_sampling_level out"
        if said is not None:
            _logger.warning(f"importance_sampling_level={level}: {said}")
            TRL_LOGGER.warning(said)
