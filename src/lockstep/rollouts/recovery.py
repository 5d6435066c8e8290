"""Repeats work that lost its engine, from its start.

Only whole pieces of work are repeated, such as a push with its probe. A single call is never repeated, because nobody
knows what a lost call left behind. Every request has a seed of its own, so repeated work gives the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import EngineLost, LockstepError

_logger = logging.getLogger(__name__)

T = TypeVar("T")
# How often one piece of work may lose its engine. Work that kills the engine must not be repeated forever.
_LOSSES = 4


class Recovery:
    """Counts lost engines. `distrust` is called when an engine answers again: its weights may be others."""

    def __init__(self, distrust: Callable[[], None]) -> None:
        self._distrust = distrust
        self.losses = 0

    def run(self, work: Callable[[], T]) -> T:
        """Do `work`, again from its start each time the engine is lost: at most four times, then a `LockstepError`."""
        for _ in range(_LOSSES):
            try:
                return work()
            except EngineLost as error:
                lost = error
            self.losses += 1
            _logger.warning(f"{lost}; waiting for it")
            start = time.monotonic()
            lost.recover()
            self._distrust()
            _logger.warning(
                f"the engine answers again after {time.monotonic() - start:.0f} s; giving it the weights again"
            )
        raise LockstepError(
            f"the engine was lost {_LOSSES} times in one piece of work, the last time: {lost}"
        )
