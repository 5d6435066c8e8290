"""Threads that run a user's code beside the engine, each call with a time limit.

`rollouts/programs/tools.py` and `rollouts/programs/environments.py` call tools and environments through them. A thread cannot be
ended from outside. Therefore a call that hangs keeps its thread, and the caller continues without it. The threads do not keep the
process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from lockstep.errors import LockstepError
from lockstep.rollouts.loop_thread import LoopThread

# Seconds in which a loop that is not blocked starts a new coroutine.
_ALIVE = 1.0


class TookTooLong(LockstepError):
    """A call did not end within its time limit."""


class Raised(LockstepError):
    """A call raised an error. That error is the cause of this one. The message says it in one line."""

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """The error of a call, whatever its kind: a SystemExit of a tool does not end the run."""
        kind, said = type(error).__name__, str(error)
        found = cls(said if said and isinstance(error, Exception) else f"{kind}: {said}" if said else kind)
        found.__cause__ = error
        return found


class Worker:
    """One thread that runs one function after the other.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], Any], limit: float) -> Any:
        """The result of `function()`.

        Raises:
            TookTooLong: the function, or one before it, did not end within `limit` seconds.
            Raised: the function raised an error.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._go, name=self._name, daemon=True)
            self._thread.start()
        found: Future[Any] = Future()
        self._work.put((function, found))
        return await _within(asyncio.wrap_future(found), limit)

    def end(self) -> None:
        """End the thread after its current call. A thread that hangs stays."""
        self._work.put(None)

    def _go(self) -> None:
        while (item := self._work.get()) is not None:
            function, found = item
            if not found.set_running_or_notify_cancel():
                continue
            try:
                found.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                found.set_exception(Raised.of(error))
            # A worker that waits for its next call keeps no arguments and results alive.
            del item, function, found


class ToolLoop:
    """A thread with an event loop, for coroutine functions. Calls run concurrently.

    It is not the loop that talks to the engine. Therefore a coroutine function that blocks its loop stops no sampling. If a
    coroutine function blocks the loop for longer than its time limit, later calls get a new loop.
    """

    def __init__(self) -> None:
        self._thread = LoopThread("lockstep-tools")

    async def run(self, function: Callable[[], Awaitable[Any]], limit: float) -> Any:
        """The result of `await function()`.

        Raises:
            TookTooLong: it did not come within `limit` seconds.
            Raised: the function raised an error.
        """
        loop = self._thread.get()
        found = asyncio.run_coroutine_threadsafe(_guarded(function), loop)
        try:
            return await _within(asyncio.wrap_future(found), limit)
        except TookTooLong:
            if self._thread.loop is loop and not await _gives_way(loop):
                self._thread.leave(loop)
            raise

    def end(self) -> None:
        """End the thread, unless a call blocks it."""
        self._thread.end()


async def in_thread(function: Callable[[], Any], limit: float, name: str = "lockstep-tool") -> Any:
    """The result of `function()`, which runs in a thread of its own.

    Raises:
        TookTooLong: the function did not end within `limit` seconds.
        Raised: the function raised an error.
    """
    worker = Worker(name)
    try:
        return await worker.run(function, limit)
    finally:
        worker.end()


async def _within(awaited: asyncio.Future[Any], limit: float) -> Any:
    try:
        return await asyncio.wait_for(awaited, limit)
    except TimeoutError as error:
        raise TookTooLong(f"no result within {limit:g} s") from error


async def _guarded(function: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await function()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The user's code cancelled itself; its rollout goes on.
        raise Raised.of(error) from error
    except BaseException as error:
        raise Raised.of(error) from error


async def _gives_way(loop: asyncio.AbstractEventLoop) -> bool:
    found = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(found), _ALIVE)
    except TimeoutError:
        return False
    return True
