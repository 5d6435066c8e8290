"""What a run does when its engine is lost in the middle of a step: waits for it, distrusts it, and does the step's work again.

Only whole pieces of work are repeated (a push with its probe, a generation), never a single call: what a lost call left behind is
not known, and every request has its own seed, so that the same work gives the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import EngineLost, LockstepError
from lockstep.report.busy import busy

T = TypeVar("T")
# How often one piece of work may lose its engine: an engine that dies of the work itself would take it for ever.
_LOSSES = 4


class Recovery:
    """Repeats work that lost its engine.

    Args:
        distrust: called when an engine has come back: it may be another one, with other weights.
    """

    def __init__(self, distrust: Callable[[], None]) -> None:
        self._distrust = distrust
        self.losses = 0

    def run(self, work: Callable[[], T]) -> T:
        """Do `work`, again from its start whenever the engine is lost.

        Raises:
            LockstepError: the engine did not come back in time, or was lost too often.
        """
        for _ in range(_LOSSES):
            try:
                return work()
            except EngineLost as error:
                lost = error
            self.losses += 1
            _say(f"{lost}; waiting for it")
            start = time.monotonic()
            with busy("waiting for the engine"):
                lost.recover()
            self._distrust()
            _say(f"the engine answers again after {time.monotonic() - start:.0f} s; giving it the weights anew")
        raise LockstepError(f"the engine was lost {_LOSSES} times in one piece of work, the last time: {lost}")


def _say(line: str) -> None:
    print(f"lockstep: {line}", flush=True)
