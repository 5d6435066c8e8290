"""Generations that an engine samples while the trainer still learns from earlier ones.

The driver runs each generation in a thread of its own. A push can happen in the middle of a turn: the new weights
then sample all later tokens, with keys and values that they computed themselves. Every token carries the weight
version that sampled it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from lockstep.errors import LockstepError
from lockstep.progress import waiting
from lockstep.rollouts.conversation import Program
from lockstep.rollouts.driver import Driver, Rollouts, Running, Start
from lockstep.rollouts.group import Rollout


class GenerationsAhead:
    """The generations that are running, by their number.

    Args:
        limit: seconds that one request may take, beside those of the other generations.
        at_once: whether the engine works only while the trainer waits. Then `begin` returns a complete generation.
    """

    def __init__(self, driver: Driver, limit: float, *, at_once: bool = False) -> None:
        self._driver, self._limit, self._at_once = driver, limit, at_once
        self._gate = threading.Lock()
        self._running: dict[int, tuple[Running, Future[Rollouts]]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._running

    @contextmanager
    def held(self) -> Iterator[None]:
        """While weights are pushed: start no new request. The engine continues its running requests afterwards."""
        with self._gate:
            yield

    def begin(self, number: int, starts: Sequence[Start], program: Program) -> None:
        """Begin a generation; a `LockstepError` if the engine does not take its first requests in time."""
        limit = self._limit
        running = self._driver.begin(starts, program, limit=limit, patience=limit, gate=self._gate)
        found: Future[Rollouts] = Future()
        if self._at_once:
            found.set_result(running.finish())
        self._running[number] = running, found
        if self._at_once:
            return

        def work() -> None:
            try:
                found.set_result(running.finish())
            except BaseException as error:  # noqa: BLE001 - `take` raises it
                found.set_exception(error)

        # A daemon thread, so that a program that ends does not wait for it.
        threading.Thread(target=work, name=f"lockstep-generation-{number}", daemon=True).start()
        # Generations start in order, because the engine serves requests in the order in which it gets them.
        with waiting("the engine to begin a generation", limit):
            has_begun = running.await_begin(limit)
        if not has_begun:
            raise LockstepError(f"generation {number} could not be begun within {limit:.0f} s")

    def take(self, number: int) -> Rollouts:
        """Wait for the rollouts of a generation, which then no longer counts as running. Raises as `Running.finish`.

        The time limits of its requests, and of the time without a request, bound the wait.
        """
        running, found = self._running[number]
        with waiting("the rollouts of a generation", None, lambda: f"{len(running.finished())} are finished"):
            rollouts = found.result()
        del self._running[number]
        return rollouts

    def finished(self) -> dict[int, list[Rollout]]:
        """The rollouts that are finished by now, by the number of their generation."""
        return {number: running.finished() for number, (running, _) in self._running.items()}

    def forget_unfinished(self) -> None:
        """Drop generations that are not complete: the engine was lost, and no longer knows them."""
        for number, (_, found) in list(self._running.items()):
            if not found.done() or found.exception() is not None:
                self._forget(number)

    def forget(self) -> None:
        """Drop all generations, and their requests in the engine."""
        for number in list(self._running):
            self._forget(number)

    def _forget(self, number: int) -> None:
        running, _ = self._running.pop(number)
        running.stop(LockstepError(f"generation {number} was given up"))
