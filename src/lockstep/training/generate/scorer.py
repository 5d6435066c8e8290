"""Scorers give rollouts their rewards: by reward functions and reward models with weights, or by a judge.

Comes from: a trainer's constructor. Goes to: `training/generate/source.py`, which calls it on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import InputError
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.judges import PairwiseJudge, judge_pairs, judged
from lockstep.rollouts.reward_functions import Given, ProcessingClasses, entries_of, reward_functions
from lockstep.rollouts.reward_log import RewardLog
from lockstep.rollouts.rewards import call_functions, check_scored, weigh_scores
from lockstep.training.config.online_config import OnlineConfig


@dataclass(frozen=True, slots=True)
class Scorer:
    """Gives groups their rewards, in two halves. Each rank does the first half for its share of the groups.

    Attributes:
        score: takes some groups, the trainer's state, and a log for metrics of reward functions; returns the groups with scores.
        finish: takes all groups with their scores; returns them with rewards.
    """

    score: Callable[[Sequence[RolloutGroup], Any, RewardLog], list[RolloutGroup]]
    finish: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]]


def reward_scorer(given: Given | list[Given] | None, tokenizers: ProcessingClasses, args: OnlineConfig) -> Scorer:
    """A scorer whose reward is the weighted sum of reward functions and reward models.

    Raises:
        InputError: no function is given, an entry is neither a function nor a reward model, or the number of weights is wrong.
    """
    entries = entries_of(given)
    if not entries or None in entries:
        raise InputError("no reward function given")
    weights = list(args.reward_weights) if args.reward_weights is not None else [1.0] * len(entries)
    if len(weights) != len(entries):
        raise InputError(f"reward_weights has {len(weights)} entries for {len(entries)} reward functions")
    kwargs: Any = args.chat_template_kwargs
    functions = reward_functions(entries, tokenizers, chat_template_kwargs=kwargs, device=args.device)

    def score(groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        return call_functions(groups, functions, state, args.reward_timeout, log)

    return Scorer(score, lambda groups: weigh_scores(groups, weights))


def judge_scorer(judge: PairwiseJudge) -> Scorer:
    """A scorer for pairs: 1 for the completion that a judge prefers, 0 for the other, no score without a verdict.

    Raises:
        InputError: the object has no method `judge`.
    """
    if not callable(getattr(judge, "judge", None)):
        raise InputError(f"judge is a {type(judge).__name__} without a method 'judge' (see lockstep.rollouts.judges)")

    def score(groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        verdicts = judge_pairs(groups, judge)
        return [judged(group, verdict) for group, verdict in zip(groups, verdicts, strict=True)]

    def finish(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        check_scored(groups, "no verdict")
        return list(groups)

    return Scorer(score, finish)
