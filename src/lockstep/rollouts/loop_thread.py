"""An event loop in a thread of its own, for a user's coroutine functions.

Reward functions, tools and environments have a loop of their own. A function that blocks the loop stops neither the
engine nor the caller. The thread does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import os
import threading


class LoopThread:
    """A loop that is started when it is first needed. A forked process gets another one.

    Args:
        name: of the thread.

    Attributes:
        loop: the loop that the next call gets; None: a new one.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._name, self._process, self._starting = name, 0, threading.Lock()

    def get(self) -> asyncio.AbstractEventLoop:
        """The loop. It is started if it does not run."""
        with self._starting:
            if self.loop is None or self.loop.is_closed() or self._process != os.getpid():
                self.loop, self._process = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=_forever, args=(self.loop,), name=self._name, daemon=True).start()
            return self.loop

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let later calls have another loop, because something blocks this one."""
        with self._starting:
            if self.loop is loop:
                self.loop = None


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
