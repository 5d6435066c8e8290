"""Generations in which no rollout has a score: the run goes on, says so, and ends if too many of them follow each other.

`training/loop.py` calls it with every scored generation. Nothing is learned from rewards in such a generation, as in TRL.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lockstep.errors import InputError
from lockstep.rollouts.group import RolloutGroup
from lockstep.terminal_log import TRL_LOGGER

_logger = logging.getLogger(__name__)


class UnscoredGenerations:
    """Counts the generations without a single score.

    Args:
        limit: number of such generations in a row that ends the run.
        owner: whether this process prints the warnings.
    """

    def __init__(self, limit: int, *, owner: bool) -> None:
        self._limit, self._owner = limit, owner
        self._in_a_row = 0

    def note(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Count one generation.

        Returns:
            The metric `rewards/unscored_generations`, which is 1, if the generation has no score; otherwise nothing.

        Raises:
            InputError: it is the last of `limit` such generations in a row.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if any(rollout.scored for rollout in rollouts):
            self._in_a_row = 0
            return {}
        self._in_a_row += 1
        names = ", ".join(rollouts[0].scores)
        if self._in_a_row >= self._limit:
            raise InputError(
                f"none of {names} scored any of the {len(rollouts)} completions, in {self._in_a_row} generations in a row: there "
                "is nothing to learn from. Let one return numbers, leave these rows out of the data, or raise "
                "max_unscored_generations"
            )
        if self._owner:
            _logger.warning(
                f"none of {names} scored any of the {len(rollouts)} completions of this generation: no reward is "
                f"learned from it (this is generation {self._in_a_row} in a row; the run ends at {self._limit})"
            )
            prompt = groups[0].prompt
            TRL_LOGGER.warning(
                "All reward functions returned None for the following kwargs:\n%s",
                {"prompt": prompt.source, **prompt.columns},
            )
        return {"rewards/unscored_generations": 1.0}
