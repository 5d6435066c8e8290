"""A thread with an event loop that runs coroutines for other threads.

`engines/http/vllm_server.py` makes its HTTP calls in one such thread, and `rollouts/driver.py` runs programs in another. A program
that blocks its own thread therefore does not delay the calls to a server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from lockstep.errors import LockstepError

T = TypeVar("T")
R = TypeVar("R")
# Seconds that `close` waits for the cancelled calls to end.
_ENDING = 10.0


class CallLoop:
    """A thread that runs coroutines. Any other thread may start one in it. A time limit in a coroutine covers the whole call."""

    def __init__(self, name: str = "lockstep-calls") -> None:
        self._closed = False
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = (
            concurrent.futures.Future()
        )
        # A daemon thread: when the program ends, it does not wait for a call that blocks this thread.
        self.thread = threading.Thread(target=asyncio.run, args=(_serve(started),), name=name, daemon=True)
        self.thread.start()
        self.loop, stopped = started.result()
        # If the owner is freed without `close`, the thread ends too, and its files are closed.
        self._stop = weakref.finalize(self, self.loop.call_soon_threadsafe, stopped.set)
        self._stop.atexit = False

    def start(self, call: Coroutine[Any, Any, T], check: Callable[[T], R]) -> Pending[T, R]:
        """Begin a call.

        Args:
            check: converts the answer to the result. It runs in the thread that waits for the result.

        Raises:
            LockstepError: the engine is already closed.
        """
        if self._closed:
            call.close()
            raise LockstepError(CLOSED)
        return Pending(asyncio.run_coroutine_threadsafe(call, self.loop), check)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call and wait for its result.

        Raises:
            LockstepError: the engine was closed before or during the call.
        """
        return self.start(call, lambda found: found).result()

    def close(self) -> None:
        """Cancel every call, and end the thread. Safe to call again. If a call blocks the thread, `close` stops waiting for it."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        self.thread.join(_ENDING)


async def _serve(started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Keep the loop running until the event is set. `asyncio.run` then cancels the remaining calls, and closes the loop."""
    stopped = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stopped))
    await stopped.wait()


CLOSED = "the engine was closed while it was being used"


class Pending(Generic[T, R]):
    """A call in progress.

    Args:
        future: the future of the call.
        check: converts the answer to the result.
    """

    def __init__(self, future: concurrent.futures.Future[T], check: Callable[[T], R]) -> None:
        self._future, self._check = future, check

    def result(self) -> R:
        """Wait for the result. If the wait is interrupted, the call is cancelled.

        Raises:
            LockstepError: the engine was closed during the call, or the call was cancelled.
        """
        try:
            found = self._future.result()
        except concurrent.futures.CancelledError as error:
            raise LockstepError(CLOSED) from error
        except BaseException:
            self._future.cancel()
            raise
        return self._check(found)

    def done(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self._future.done()

    def when_done(self, react: Callable[[object], None]) -> None:
        """Call a function when the call has ended, from the thread in which it ends."""
        self._future.add_done_callback(react)

    def wait(self, limit: float | None = None) -> None:
        """Wait until the call has ended, with or without an error, or until `limit` seconds have passed."""
        concurrent.futures.wait([self._future], limit)

    def cancel(self) -> None:
        """Cancel the call. The server then drops its requests too."""
        self._future.cancel()
