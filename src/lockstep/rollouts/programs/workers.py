"""Places where a user's tools and environments run, each call with a time limit.

Plain functions run in the thread that serves the engine (`Here`), because signals and connections work there, or in
another thread (`Worker`). What hangs is ended. In another thread a call that blocks cannot be ended: it keeps its
thread, and the caller continues without it. These threads do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from lockstep.contract.inbox import Errands
from lockstep.errors import LockstepError
from lockstep.threads import USERS_LOOP, OutOfTime, ended_within, folder_as_before, process_as_before

T = TypeVar("T")

# Seconds in which a loop that is not blocked starts a new coroutine.
_ALIVE = 1.0
# Seconds after its time limit in which a function that can be ended has ended.
_GRACE = 1.0


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


class Here:
    """The thread in which the engine is served, most often the main thread: signals and connections work in it.

    It does the calls between two steps of the engine, in the order in which programs make them.
    """

    def __init__(self) -> None:
        self.errands = Errands()
        self.in_main_thread = True

    async def run(self, function: Callable[[], Any], limit: float, what: str) -> Any:
        """The result of `function()`.

        Raises:
            TookTooLong: the function did not end within `limit` seconds, and was ended.
            Raised: the function raised an error.
        """

        def guarded() -> Any:
            self.in_main_thread = threading.current_thread() is threading.main_thread()
            with process_as_before(what):
                return _limited(function, limit, what)

        return await asyncio.wrap_future(self.errands.ask(guarded))

    def do(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that belongs into this thread. Only this thread calls."""
        return work()

    def end(self) -> None:
        """Nothing: the thread is the caller's."""


class Worker:
    """One thread that runs one function after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work = queue.SimpleQueue[tuple[Callable[[], Any], Future[None], Future[Any]] | None]()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], Any], limit: float, what: str) -> Any:
        """The result of `function()`, which begins when the functions before it have ended. Raises as `Here.run`.

        If a function cannot be ended, later ones run in another thread.
        """

        def guarded() -> Any:
            with folder_as_before(what, limit + _GRACE):
                return _limited(function, limit, what, awaited=False)

        begun, found = self._ask(guarded)
        await asyncio.wrap_future(begun)
        thread = self._thread
        try:
            return await _within(asyncio.wrap_future(found), limit, limit + _GRACE)
        except TookTooLong:
            if not found.done() or found.cancelled():
                self._leave(thread)
            raise

    def do(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that belongs into this thread, for another thread that waits. Errors keep their type.

        Raises:
            TookTooLong: the work did not end within `limit` seconds.
        """
        begun, found = self._ask(work)
        begun.result()
        try:
            return found.result(limit)
        except TimeoutError as error:
            if found.done():
                raise
            self._leave(self._thread)
            raise TookTooLong(f"no result within {limit:g} s") from error

    def end(self) -> None:
        """End the thread after its current call. A thread that hangs stays."""
        self._work.put(None)

    def _ask(self, work: Callable[[], Any]) -> tuple[Future[None], Future[Any]]:
        if self._thread is None:
            self._start()
        begun, found = Future[None](), Future[Any]()
        self._work.put((work, begun, found))
        return begun, found

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._go, name=self._name, daemon=True)
        self._thread.start()

    def _leave(self, thread: threading.Thread | None) -> None:
        """Let another thread do what comes after a function that hangs."""
        if self._thread is thread:
            self._start()

    def _go(self) -> None:
        while self._thread in (None, threading.current_thread()) and (item := self._work.get()) is not None:
            work, begun, found = item
            if not begun.set_running_or_notify_cancel():
                found.cancel()
                continue
            begun.set_result(None)
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                _give(found, None, error)
            else:
                _give(found, result, None)
                del result
            # A worker that waits for its next call keeps no arguments and results alive.
            del item, work, begun, found


def _give(found: Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a result or an error to a caller, if it has not gone on meanwhile."""
    if found.set_running_or_notify_cancel():
        if error is None:
            found.set_result(result)
        else:
            found.set_exception(error)


def _limited(function: Callable[[], Any], limit: float, what: str, *, awaited: bool = True) -> Any:
    try:
        return ended_within(limit, what, function, awaited=awaited)
    except OutOfTime as error:
        raise TookTooLong(f"no result within {limit:g} s") from error
    except BaseException as error:
        # Ctrl-C reaches the main thread only, and ends the run.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise Raised.of(error) from error


async def in_loop(function: Callable[[], Awaitable[Any]], limit: float, what: str) -> Any:
    """The result of `await function()`, in the loop of the user's coroutine functions. Raises as `Here.run`.

    It is not the loop that talks to the engine: a coroutine function that blocks it stops no sampling. If it is blocked
    for longer than the time limit, later calls get a new loop.
    """
    loop = USERS_LOOP.get()
    found = asyncio.run_coroutine_threadsafe(_guarded(function, limit, what), loop)
    try:
        return await _within(asyncio.wrap_future(found), limit)
    except TookTooLong:
        if USERS_LOOP.loop is loop and not await _gives_way(loop):
            USERS_LOOP.leave(loop)
        raise


async def in_thread(function: Callable[[], Any], limit: float, what: str) -> Any:
    """The result of `function()`, which runs in a thread of its own. Raises as `Here.run`."""
    worker = Worker("lockstep-tool")
    try:
        return await worker.run(function, limit, what)
    finally:
        worker.end()


async def _within(awaited: asyncio.Future[Any], limit: float, wait: float | None = None) -> Any:
    try:
        return await asyncio.wait_for(awaited, limit if wait is None else wait)
    except TimeoutError as error:
        raise TookTooLong(f"no result within {limit:g} s") from error


async def _guarded(function: Callable[[], Awaitable[Any]], limit: float, what: str) -> Any:
    try:
        with folder_as_before(what, limit + _GRACE):
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
