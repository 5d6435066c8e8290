"""An answer on its way to a client that reads it as a stream: text is sent as soon as it is certain.

`extras/agents/recording.py` tells `Heard` what is certain, from its event loop. The event loop of the server takes it from
there, and sends the events that `SentText` makes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from lockstep.extras.agents.calls import Answer, Partial
from lockstep.extras.agents.refusals import Refused


class Heard:
    """The listener of one streamed answer.

    Args:
        loop: the event loop in which the answer is sent.

    Attributes:
        begin: name and time of the answer, when its turn has begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._begun, self._changed = asyncio.Event(), asyncio.Event()
        self._latest: Partial | None = None
        self.begin: tuple[str, int] | None = None

    def begun(self, name: str, created: int) -> None:
        def note() -> None:
            self.begin = name, created
            self._begun.set()

        self._loop.call_soon_threadsafe(note)

    def said(self, partial: Partial) -> None:
        def note() -> None:
            self._latest = partial
            self._changed.set()

        self._loop.call_soon_threadsafe(note)

    async def begins(self) -> None:
        """Wait until the turn begins."""
        await self._begun.wait()

    async def until(self, answer: asyncio.Future[Answer]) -> AsyncIterator[Partial]:
        """What is certain of the answer, each time that there is more, until the answer is there."""
        answer.add_done_callback(lambda _: self._changed.set())
        while not answer.done():
            await self._changed.wait()
            self._changed.clear()
            if self._latest is not None and not answer.done():
                yield self._latest


class _Events(Protocol):
    """The events of an API (`extras/agents/chat_completions.py`, `extras/agents/responses.py`)."""

    def start(self) -> Iterator[bytes]: ...

    def thought(self, text: str) -> Iterator[bytes]: ...

    def said(self, text: str) -> Iterator[bytes]: ...

    def end(self, answer: Answer) -> Iterator[bytes]: ...


class SentText:
    """Sends each character of an answer once, in order: first the thinking, then the content."""

    def __init__(self, events: _Events) -> None:
        self._events = events
        self._reasoning: str | None = None
        self._content = ""

    def start(self) -> Iterator[bytes]:
        """The events before all text."""
        return self._events.start()

    def more(self, partial: Partial) -> Iterator[bytes]:
        """Send what is new.

        Raises:
            Refused: the text does not begin with what was sent. This is a defect: the client must not take it for the answer.
        """
        # Less is certain for a moment where a marker may have begun.
        if partial.reasoning is not None and (self._reasoning is None or len(partial.reasoning) > len(self._reasoning)):
            yield from self._events.thought(_rest(partial.reasoning, self._reasoning or ""))
            self._reasoning = partial.reasoning
        if len(partial.content) > len(self._content):
            yield from self._events.said(_rest(partial.content, self._content))
            self._content = partial.content

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Send the rest of the answer.

        Raises:
            Refused: the text does not begin with what was sent. This is a defect.
        """
        _rest(answer.reasoning or "", self._reasoning or "")
        _rest(answer.content, self._content)
        yield from self.more(Partial(answer.reasoning, answer.content))
        yield from self._events.end(answer)


def _rest(text: str, sent: str) -> str:
    """What follows in a text after that which was sent of it."""
    if not text.startswith(sent):
        raise Refused(500, "the finished turn differs from what was streamed of it", "stream_differs")
    return text[len(sent) :]
