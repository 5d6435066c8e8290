"""The configuration of GRPO and its variants, with TRL's names: loss types, trust regions, entropy, scaling of rewards."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.algorithms.advantages import ScaleRewards
from lockstep.algorithms.policy_loss import ImportanceLevel, LossType
from lockstep.errors import InputError
from lockstep.terminal_log import TRL_LOGGER
from lockstep.training.config.documented import documented
from lockstep.training.config.group_config import GroupConfig
from lockstep.training.config.option import SHARE, Bounds, option

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
    )
    importance_sampling_level: ImportanceLevel = option(
        "token", "One ratio per token, or one per completion (GSPO).", group="method"
    )
    delta: float | None = option(
        None,
        "Bound of the unclipped ratio (dual clipping); sensibly above 1 + epsilon.",
        group="method",
        bounds=Bounds(0, above=True, infinite=True),
    )
    sapo_temperature_pos: float = option(
        1.0, "SAPO's temperature for positive advantages.", group="method", bounds=Bounds(0, above=True)
    )
    sapo_temperature_neg: float = option(
        1.05, "SAPO's temperature for negative advantages.", group="method", bounds=Bounds(0, above=True)
    )
    vespo_k_pos: float = option(2.0, "VESPO's exponent for positive advantages.", group="method")
    vespo_lambda_pos: float = option(3.0, "VESPO's decay for positive advantages.", group="method")
    vespo_k_neg: float = option(3.0, "VESPO's exponent for negative advantages.", group="method")
    vespo_lambda_neg: float = option(2.0, "VESPO's decay for negative advantages.", group="method")
    use_bias_correction_kl: bool = option(
        True, "Weight the KL term by the importance ratio, which makes its gradient unbiased.", group="method"
    )
    scale_rewards: str = option("group", "`group`, `batch`, `advantages` (ScaleRL's) or `none`.", group="method")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", "Sum the rewards, or normalise each by itself first (GDPO).", group="method"
    )
    average_by_prompt: bool = option(
        False,
        "Average over each prompt's tokens, then over prompts, instead of as loss_type does (ScaleRL).",
        group="method",
    )
    filter_zero_variance: bool = option(
        False,
        "Leave groups with equal rewards out of the step, including its averages and standard deviation.",
        group="method",
    )
    top_entropy_quantile: float = option(
        1.0,
        "Share of a step's tokens, those with the highest entropy, that the policy term learns from.",
        group="method",
        bounds=SHARE,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", group="method")
    use_adaptive_entropy: bool = option(
        False, "Raise entropy_coef while entropy is at or below entropy_target, else lower it.", group="method"
    )
    entropy_coef_min: float = option(0.0, "Smallest coefficient of the adaptive bonus.", group="method")
    entropy_coef_max: float = option(1.0, "Largest coefficient of the adaptive bonus.", group="method")
    entropy_coef_delta: float = option(0.005, "Change of the adaptive coefficient per step.", group="method")
    entropy_target: float = option(0.2, "Target entropy of the adaptive bonus, in nats per token.", group="method")
    off_policy_mask_threshold: float | None = option(
        None,
        "Drop completions with a negative advantage whose mean log-prob has fallen by more than this.",
        group="method",
        bounds=Bounds(infinite=True),
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
