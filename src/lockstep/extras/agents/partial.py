"""The part of an unfinished turn's text that the finished answer certainly begins with.

It runs while a turn is sampled, for answers that are streamed. Text is held back as long as later tokens could still
change what it is: half of a character, white space at the end, a marker of thinking or of a tool call that may have
begun. It is sent with a later part, or at the end.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from lockstep.extras.agents.calls import Listener, Partial
from lockstep.extras.agents.wishes import Wishes
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.conversation.extension import Extension
from lockstep.tokens.conversation.tool_calls import text_before_calls, without_beginning

# Bytes of a character that is not complete yet are decoded to U+FFFD.
_OPEN = re.compile("[\\s\ufffd]+$")
# Seconds between two readings of a turn, and the largest share of the event loop's time that one stream takes.
_EVERY, _SHARE = 0.05, 0.005


class Teller:
    """Tells a listener what is certain of an answer while its turn is sampled.

    Each time the whole turn is read again. Therefore a long turn is read more rarely, so that many streams together do not fill the
    event loop.

    Args:
        loop: the event loop in which the turn is read. The engine's thread only copies the ids.
        extension, wishes: as in `certain_part`.
    """

    def __init__(
        self,
        extension: Extension,
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        *,
        wishes: Wishes,
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
    """The certain part of the answer that begins with the sampled ids (N,).

    Args:
        wishes: of the call. They say whether tool calls are text, and which strings end the text.
    """
    how, turn = extension.conventions, extension.read(ids, calls_are_text=not wishes.reads_calls)
    if turn.calls or turn.errors or how.content_mark:
        return Partial(None, "")
    reasoning, content = turn.reasoning, turn.content
    # Content stands after the end of the thinking.
    if reasoning is not None and not content:
        reasoning = _OPEN.sub("", without_beginning(reasoning, how.thinking[1]))
    if how.thinking_field is not None and turn.reasoning is None and how.thinking[0].startswith(content.lstrip()):
        content = ""
    if extension.reads_calls and wishes.reads_calls:
        content = text_before_calls(content, how.tool_format)
    content = wishes.before_stop(content)
    for stop in wishes.stop:
        content = without_beginning(content, stop)
    return Partial(reasoning, _OPEN.sub("", content))
