"""Scores groups in one call, for tests of the inputs and outputs of reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.rewards import RewardFunction, RewardLog, RewardScorer


def score_groups(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    *,
    trainer_state: Any = None,
    timeout: float = 600.0,
    log: RewardLog | None = None,
) -> list[RolloutGroup]:
    """The groups, with the rewards of a `RewardScorer`."""
    scorer = RewardScorer(functions, weights, timeout)
    return scorer.finish(scorer.score(groups, trainer_state, log or RewardLog()))
