"""An answer on its way to a client that reads it as a stream: text is sent as soon as it is certain.

Text is held back as long as later tokens could still change what it is: half of a character, white space at the end, a
marker of thinking or of a tool call that may have begun. It is sent with a later part, or at the end. `Teller` tells
what is certain from the event loop of the rollout; `Heard` takes it to the event loop of the server, which sends the
events that `SentText` makes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

from lockstep.extras.agents.agent_calls import Answer, Listener, Partial, Wishes
from lockstep.extras.agents.request_fields import Refused
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.extension import Extension
from lockstep.tokens.tool_calls import text_before_calls, without_beginning


class Heard:
    """The listener of one streamed answer, which is sent in `loop`.

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
            Refused: the text does not begin with what was sent: a defect, and the client must not take it for the
                answer.
        """
        # Less is certain for a moment where a marker may have begun.
        thought, sent = partial.reasoning, self._reasoning
        if thought is not None and (sent is None or len(thought) > len(sent)):
            yield from self._events.thought(_rest(thought, sent or ""))
            self._reasoning = thought
        if len(partial.content) > len(self._content):
            yield from self._events.said(_rest(partial.content, self._content))
            self._content = partial.content

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Send the rest of the answer. Raises as `more`."""
        _rest(answer.reasoning or "", self._reasoning or "")
        _rest(answer.content, self._content)
        yield from self.more(Partial(answer.reasoning, answer.content))
        yield from self._events.end(answer)


def _rest(text: str, sent: str) -> str:
    """What follows in a text after that which was sent of it."""
    if not text.startswith(sent):
        raise Refused(500, "the finished turn differs from what was streamed of it", "stream_differs")
    return text[len(sent) :]


# Bytes of a character that is not complete yet are decoded to U+FFFD.
_OPEN = re.compile("[\\s\ufffd]+$")
# Seconds between two readings of a turn, and the largest share of the event loop's time that one stream takes.
_EVERY, _SHARE = 0.05, 0.005


class Teller:
    """Tells a listener what is certain of an answer while its turn is sampled.

    Each time the whole turn is read again, in `loop`. Therefore a long turn is read more rarely, so that many streams
    together do not fill the event loop.
    """

    def __init__(
        self, extension: Extension, listener: Listener, loop: asyncio.AbstractEventLoop, *, wishes: Wishes
    ) -> None:
        self._extension, self._wishes = extension, wishes
        self._listener, self._loop = listener, loop
        self._next = 0.0

    def progress(self, ids: Sequence[int]) -> None:
        """Take the ids (N,) of the turn so far. For the engine's thread."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            self._loop.call_soon_threadsafe(self._tell, whole_numbers(ids))

    def _tell(self, ids: Ids) -> None:
        begun = time.monotonic()
        self._listener.said(certain_part(self._extension, ids, self._wishes))
        took = time.monotonic() - begun
        self._next = max(self._next, begun + took / _SHARE)


def certain_part(extension: Extension, ids: Ids, wishes: Wishes) -> Partial:
    """The certain part of the answer that begins with the sampled ids (N,)."""
    how, turn = extension.conventions, extension.read(ids, calls_are_text=not wishes.reads_calls)
    if turn.calls or turn.errors or how.content_mark:
        return Partial(None, "")
    reasoning, content = turn.reasoning, turn.content
    # Content stands after the end of the thinking.
    if reasoning is not None and not content:
        reasoning = _OPEN.sub("", without_beginning(reasoning, how.thinking[1]))
    may_think = how.thinking_field is not None and turn.reasoning is None
    if may_think and how.thinking[0].startswith(content.lstrip()):
        content = ""
    if extension.reads_calls and wishes.reads_calls:
        content = text_before_calls(content, how.tool_format)
    content = wishes.before_stop(content)
    for stop in wishes.stop:
        content = without_beginning(content, stop)
    return Partial(reasoning, _OPEN.sub("", content))
