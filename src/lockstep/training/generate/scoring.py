"""Rewards of a generation: every rank scores its share of the groups, and every rank gets all scores.

`training/generate/source.py` passes sampled groups in. Groups with their rewards come out, the same on every rank, and the metrics
that reward functions have logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.across_ranks.wire import scores_from_wire, scores_to_wire
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.scores.early_scores import EarlyScores
from lockstep.rollouts.scores.reward_log import RewardLog
from lockstep.rollouts.scores.rewards import Scorer
from lockstep.training.generate.rollouts.tools import RolloutTools
from lockstep.training.step.distributed import share_of

if TYPE_CHECKING:
    # It needs the libraries of a web server.
    from lockstep.training.generate.rollouts.agents import RolloutAgents

_logger = logging.getLogger(__name__)

# How many reasons of rollouts that could not be finished are named.
_MOST_TOLD = 20


class Scoring:
    """The rewards of groups.

    Args:
        scorer: gives groups their rewards.
        tools: the tools and environments of the rollouts, or their agents, which keep what reward functions may ask for until the
            rollouts are scored; None: there are none.
    """

    def __init__(self, scorer: Scorer, ranks: Ranks, tools: RolloutTools | RolloutAgents | None) -> None:
        self._scorer, self._ranks, self._tools = scorer, ranks, tools
        self.log = RewardLog()
        self._told: set[str] = set()

    def score(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Groups with their rewards. Every rank calls.

        Args:
            state: the trainer's state, which reward functions may ask for.
        """
        return self.finish(self._on_ranks(groups, state))

    def early(self, prompts: Sequence[Prompt], num_generations: int, state: Any) -> EarlyScores:
        """Scores groups one by one while others are being sampled. `finish` takes what it returns."""

        def score(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
            return self._scorer.score(groups, state, log)

        return EarlyScores(prompts, num_generations, score)

    def finish(self, scored: list[RolloutGroup]) -> list[RolloutGroup]:
        """What the scorer computes over the whole generation; then tools let go of what they kept for the rewards."""
        scored = self._scorer.finish(scored)
        if self._tools is not None and self._ranks.owner:
            self._tools.release(rollout for group in scored for rollout in group.rollouts)
        return scored

    def _on_ranks(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        if self._ranks.count == 1:
            return self._scorer.score(groups, state, self.log)

        def part() -> dict[str, Any]:
            # A rank without groups does not call the reward functions. Environments are on one rank, which then scores all groups.
            here = self._tools is not None and self._tools.has_environments
            own: Sequence[RolloutGroup] = share_of(groups, self._ranks)
            if here:
                own = groups if self._ranks.owner else []
            log = RewardLog()
            return {
                "scores": scores_to_wire(self._scorer.score(own, state, log) if own else []),
                "metrics": log.values(),
            }

        parts = self._ranks.share("rewards", part)
        for found in parts:
            self.log.add(found["metrics"])
        return scores_from_wire([found["scores"] for found in parts], groups)

    def metrics(self, groups: Sequence[RolloutGroup], so_far: Mapping[str, float]) -> dict[str, float]:
        """Metrics of tools, and those that reward functions have logged since the last call.

        Args:
            groups: scored groups.
            so_far: metrics of the same generation, whose names reward functions may not use.
        """
        own = dict(so_far)
        if self._tools is not None:
            own |= self._tools.metrics(groups)
            self._tell_failures(groups)
        return own | self.log.take(own=own)

    def _tell_failures(self, groups: Sequence[RolloutGroup]) -> None:
        """Print each reason for which an environment or an agent failed once."""
        for said in dict.fromkeys(r.failed for group in groups for r in group.rollouts if r.failed is not None):
            if said not in self._told and self._ranks.owner and len(self._told) < _MOST_TOLD:
                self._told.add(said)
                _logger.warning(f"{said}; nothing is learned from its rollout")
