"""Generations in which no rollout has a score: the run goes on, raises an alarm, and ends if too many of them follow each other.

It sees every scored generation. Nothing is learned from rewards in such a generation, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import InputError
from lockstep.report.alarms import Alarms
from lockstep.rollouts.group import RolloutGroup
from lockstep.terminal_log import TRL_LOGGER


class UnscoredGenerations:
    """Counts the generations without a single score.

    Args:
        limit: number of such generations in a row that ends the run.
        alarms: of the run.
        owner: whether this process logs TRL's words.
    """

    def __init__(self, limit: int, alarms: Alarms, *, owner: bool) -> None:
        self._limit, self._alarms, self._owner = limit, alarms, owner
        self._in_a_row = 0

    def note(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Count one generation, and raise an alarm about functions that gave no score in it.

        Returns:
            The metric `rewards/unscored_generations`, which is 1, if the generation has no score; otherwise nothing.

        Raises:
            InputError: it is the last of `limit` such generations in a row.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        finished = [rollout for rollout in rollouts if rollout.failed is None]
        if any(rollout.scored for rollout in rollouts):
            self._in_a_row = 0
            for name in rollouts[0].scores:
                if all(rollout.scores[name] is None for rollout in finished):
                    self._alarms.tell("reward_none", name, count=len(finished))
            return {}
        self._in_a_row += 1
        names = ", ".join(rollouts[0].scores)
        if self._in_a_row >= self._limit:
            raise InputError(
                f"none of {names} scored any of the {len(rollouts)} completions, in {self._in_a_row} generations in a row: there "
                "is nothing to learn from. Let one return numbers, leave these rows out of the data, or raise "
                "max_unscored_generations"
            )
        self._alarms.tell("unscored", names, count=len(rollouts), limit=self._limit)
        if self._owner:
            prompt = groups[0].prompt
            TRL_LOGGER.warning(
                "All reward functions returned None for the following kwargs:\n%s",
                {"prompt": prompt.source, **prompt.columns},
            )
        return {"rewards/unscored_generations": 1.0}
