"""The rewards of sampled groups: each rank scores its share, and every rank gets all scores.

Comes from: `source.py`, with groups that are the same on every rank. Gives back: these groups with their rewards. What reward
functions log meanwhile is kept until the metrics of the generation are taken. Failures of environments and agents are told once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.report.phases import PhaseClock
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.across_ranks.wire import scores_from_wire, scores_to_wire
from lockstep.rollouts.driver import OnRollout
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.scores.early_scores import EarlyScores
from lockstep.rollouts.scores.reward_log import RewardLog
from lockstep.rollouts.scores.rewards import Scorer
from lockstep.training.generate.rollout_tools import RolloutTools
from lockstep.training.step.distributed import share_of

if TYPE_CHECKING:
    # It needs the libraries of a web server.
    from lockstep.training.generate.rollout_agents import RolloutAgents

_logger = logging.getLogger(__name__)

# How many reasons of rollouts that could not be finished are named.
_MOST_TOLD = 20


class GroupScores:
    """Gives groups their rewards.

    Args:
        scorer: calls the reward functions.
        tools: the tools and environments of the rollouts, or their agents; None: there are none.
    """

    def __init__(
        self, scorer: Scorer, ranks: Ranks, clock: PhaseClock, tools: RolloutTools | RolloutAgents | None
    ) -> None:
        self._scorer, self._ranks, self._clock, self._tools = scorer, ranks, clock, tools
        self.log = RewardLog()
        self._told: set[str] = set()

    def score(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Groups with their rewards; each rank scores its share. Every rank calls."""
        with self._clock.phase("rewards"):
            return self.finished(self._scored(groups, state))

    def _scored(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
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

    def while_sampling(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        state: Any,
        sample: Callable[[OnRollout], list[RolloutGroup]],
    ) -> list[RolloutGroup]:
        """Sample, and score each group while the engine samples others. Scores count only after all answers are checked.

        Args:
            sample: samples the groups, and calls its argument with each rollout that has ended.
        """

        def score(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
            return self._scorer.score(groups, state, log)

        with EarlyScores(prompts, num_generations, score) as early:
            groups = sample(early.finished)
            with self._clock.phase("rewards"):
                return early.take(groups, self.log)

    def finished(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Groups as the trainer learns from them, after the last score. Their environments are free again."""
        scored = self._scorer.finish(groups)
        if self._tools is not None and self._ranks.owner:
            self._tools.release(rollout for group in scored for rollout in group.rollouts)
        return scored

    def tell_failures(self, groups: Sequence[RolloutGroup]) -> None:
        """Print each reason for which an environment or an agent failed once."""
        for said in dict.fromkeys(r.failed for group in groups for r in group.rollouts if r.failed is not None):
            if said not in self._told and self._ranks.owner and len(self._told) < _MOST_TOLD:
                self._told.add(said)
                _logger.warning(f"{said}; nothing is learned from its rollout")
