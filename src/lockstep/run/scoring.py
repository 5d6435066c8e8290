"""Rewards of a generation: every rank scores its share of the groups, and every rank gets all scores.

Sampled groups come in. Groups with their rewards come out, the same on every rank, and the metrics that reward
functions have logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.learn.ranks import share_of
from lockstep.report.alarms import Alarms
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.rewards import RewardLog, Scorer
from lockstep.rollouts.wire import scores_from_wire, scores_to_wire
from lockstep.run.programs import Acting

# Seconds beyond the limits of the reward functions in which they must have ended in another thread.
_ENDING = 60.0


class Scoring:
    """The rewards of groups.

    Args:
        scorer: gives groups their rewards.
        tools: the tools and environments of the rollouts, or their agents, which keep what reward functions may ask
            for until the rollouts are scored; None: there are none.
        alarms: of the run.
    """

    def __init__(self, scorer: Scorer, ranks: Ranks, tools: Acting | None, alarms: Alarms) -> None:
        self._scorer, self._ranks, self._tools, self._alarms = scorer, ranks, tools, alarms
        self.log = RewardLog()

    def score(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        """Groups with their rewards. Every rank calls.

        Args:
            state: the trainer's state, which reward functions may ask for.
        """
        return self._finish(self._on_ranks(groups, state))

    def _finish(self, scored: list[RolloutGroup]) -> list[RolloutGroup]:
        """What the scorer computes over the whole generation; then tools let go of what they kept for the rewards."""
        scored = self._scorer.finish(scored)
        for reason in (rollout.failed for group in scored for rollout in group.rollouts):
            if reason is not None:
                self._alarms.tell("rollout_failed", reason)
        if self._tools is not None and self._ranks.owner:
            for name, calls, error in (
                self._tools.calls.failing.take() if self._tools.calls is not None else ()
            ):
                self._alarms.tell("tool_fails", name, calls=calls, error=error)
            self._tools.release(rollout for group in scored for rollout in group.rollouts)
        return scored

    def _scored(self, groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        """Groups with their scores. Functions that read environments run in the environments' thread."""
        if self._tools is None:
            return self._scorer.score(groups, state, log)
        limit = self._scorer.timeout * (len(getattr(self._scorer, "functions", ())) + 1) + _ENDING
        return self._tools.beside_environments(lambda: self._scorer.score(groups, state, log), limit)

    def _on_ranks(self, groups: list[RolloutGroup], state: Any) -> list[RolloutGroup]:
        if self._ranks.count == 1:
            return self._scored(groups, state, self.log)

        def part() -> dict[str, Any]:
            # A rank without groups does not call the reward functions. Environments are on one rank, which then
            # scores all groups.
            here = self._tools is not None and self._tools.has_environments
            own: Sequence[RolloutGroup] = share_of(groups, self._ranks)
            if here:
                own = groups if self._ranks.owner else []
            log = RewardLog()
            return {
                "scores": scores_to_wire(self._scored(own, state, log) if own else []),
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
        return own | self.log.take(own=own)
