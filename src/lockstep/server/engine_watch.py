"""Whether the engine behind a server still answers. vLLM's own `/health` only says that no process of it has ended.

It is asked at each health check, and the supervisor ends a server whose engine has been silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Seconds between two questions to the engine. Everybody may ask for the server's health, and the engine must not notice it.
_EVERY = 5.0
# Seconds that a caller waits who does not say how long: the time limit of OpenAI's SDK.
_USUAL_LIMIT = 600.0


@dataclass(slots=True, eq=False)
class _Open:
    """A call that the server has not answered yet, and when its caller stops waiting."""

    until: float
    ended: float = math.inf

    def waited_until(self, now: float) -> float:
        return min(self.until, self.ended, now)


class EngineWatch:
    """Asks the engine, one question at a time, and counts the seconds for which it owes the answer.

    The engine does one thing after the other: it answers after the step or the push that it is in. A push may take long, and so may
    a step on a CPU. Therefore the seconds count only from the moment when no caller waits any more whose call came before the
    question. Calls that came after it are no excuse.
    """

    def __init__(self) -> None:
        self._open: set[_Open] = set()
        self._asked = -math.inf
        self._before: tuple[_Open, ...] = ()
        self._answer: asyncio.Task[None] | None = None

    @contextmanager
    def call(self, limit: str) -> Iterator[None]:
        """Inside the context, a caller waits for an answer.

        Args:
            limit: seconds for which it waits, as it says; another text: it does not say.
        """
        opened = _Open(time.monotonic() + _seconds(limit))
        self._open.add(opened)
        try:
            yield
        finally:
            opened.ended = time.monotonic()
            self._open.discard(opened)

    def silence(self, ask: Callable[[], Awaitable[Any]]) -> float:
        """Seconds for which the engine owes an answer; 0 if it owes none. It asks again, but does not wait.

        Args:
            ask: asks the engine something that every one of its workers answers.
        """
        now = time.monotonic()
        if self._answer is not None and not self._answer.done():
            return max(0.0, now - max([self._asked, *(call.waited_until(now) for call in self._before)]))
        if now - self._asked >= _EVERY:
            self._asked, self._before = now, tuple(self._open)
            self._answer = asyncio.ensure_future(_answered(ask))
        return 0.0


async def _answered(ask: Callable[[], Awaitable[Any]]) -> None:
    # An engine that answers with an error answers. If its process has ended, vLLM's own check says so.
    with contextlib.suppress(Exception):
        await ask()


def _seconds(limit: str) -> float:
    try:
        found = float(limit)
    except ValueError:
        return _USUAL_LIMIT
    return found if 0 <= found < math.inf else _USUAL_LIMIT
