"""Threads and event loops: a user's functions run within a time limit, and programs beside blocking work.

- A user's plain function runs in the caller's thread, because functions may use signals of their own (math-verify
  does), which only the main thread can. What it changed for the whole process is undone.
- A user's coroutine functions share one event loop, as in TRL: clients and semaphores belong to the loop in which
  they were first used. The loop has a thread of its own. So a function that blocks it is waited for no longer than
  its time, and the calling thread may have a running loop (as in a notebook). The thread does not keep the process
  alive.
- `CallLoop` runs coroutines of Lockstep for other threads. A program that blocks its own thread does not delay calls
  to a server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import functools
import inspect
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from lockstep.errors import InputError, LockstepError
from lockstep.progress import waiting

_logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two attempts to end a function that ignores the first one, and the number of attempts after which it
# is said.
_AGAIN, _ATTEMPTS = 1.0, 10
# Seconds within which a thread that executes Python code raises an exception that was set in it.
_DELIVERED = 0.1
# Ends a call that blocks, in the main thread. Hardly any program uses it.
_SIGNAL: signal.Signals | None = getattr(signal, "SIGVTALRM", None)
# What a function has changed is said once per function.
_SAID: set[tuple[str, str]] = set()


class TooSlow(InputError):
    """A function took longer than its time limit."""


class OutOfTime(Exception):
    """A call did not end within its time limit, and was ended."""


class _TooLate(BaseException):
    """Raised inside a function that takes too long. No `except Exception` of the function catches it."""


def call_within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """The result of a call of a reward function or a judge. What it has changed in PyTorch is restored.

    Args:
        seconds: the time limit, as in `ended_within`.
        what: what is called, for messages: `reward function NAME`.

    Raises:
        TooSlow: the call took longer.
    """
    try:
        with waiting(what, seconds), torch_as_before(what):
            return ended_within(seconds, what, call)
    except OutOfTime as error:
        raise TooSlow(f"{what} took longer than {seconds:g} s (reward_timeout)") from error


def ended_within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """The result of a call.

    Args:
        seconds: the time limit. In the main thread it ends everything but C code that never returns to Python, and
            says so after some seconds; in another thread it ends Python code, but no call that blocks.
        what: what is called, for messages.

    Raises:
        OutOfTime: the call took longer.
    """
    with _limit(seconds, what) as is_late:
        try:
            return call()
        except _TooLate:
            is_late.set()
    raise OutOfTime


def uses_signal(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, says that only the main thread handles signals."""
    while error is not None:
        if isinstance(error, ValueError) and str(error).startswith("signal only works in main thread"):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _limit(seconds: float, what: str) -> Iterator[threading.Event]:
    """Raise `_TooLate` in this thread after the time, and again every second, until the block ends."""
    thread, ended, lock = threading.get_ident(), threading.Event(), threading.Lock()
    raised, over = threading.Event(), [False]
    number = _SIGNAL if threading.current_thread() is threading.main_thread() else None

    def handler(signum: int, frame: FrameType | None) -> None:
        if not (over[0] or ended.is_set()):
            raise _TooLate

    def watch() -> None:
        wait, attempts = seconds, 0
        while not ended.wait(wait):
            wait, attempts = _AGAIN, attempts + 1
            if number is not None and attempts == _ATTEMPTS:
                _logger.warning(
                    f"{what} took longer than {seconds:g} s and cannot be ended: it is in code that returns "
                    f"to Python for no "
                    "signal. The run waits for it"
                )
            with lock:
                if ended.is_set():
                    return
                if number is not None:
                    signal.pthread_kill(thread, number)
                else:
                    raised.set()
                    _raise_in(thread, _TooLate)
            if number is None and not ended.wait(_DELIVERED):
                with lock:
                    if not ended.is_set():
                        _withdraw(thread)

    before = None if number is None else signal.signal(number, handler)
    watcher = threading.Thread(target=watch, name="lockstep-reward-limit", daemon=True)
    watcher.start()
    try:
        yield ended
    finally:
        # From here on the handler raises nothing, also if its signal is on its way.
        try:
            over[0] = True
        except _TooLate:
            over[0] = True
        ended.set()
        with lock:
            # The watcher has raised by now what it will raise.
            late = raised.is_set()
        if late:
            _take_what_was_raised(thread)
        watcher.join()
        if number is not None:
            signal.signal(number, before if before is not None else signal.SIG_DFL)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an error when it next executes Python code.

    None: nothing that waits for this is raised any more.
    """
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)


def _withdraw(thread: int) -> None:
    """Take back an exception that a thread does not raise, because it waits in code that does not return to Python.

    As long as it waits there, every other thread of Python 3.11 would look for it at every call
    (`_take_what_was_raised`).
    """
    _raise_in(thread, None)
    _take_what_was_raised(threading.get_ident())


def _take_what_was_raised(thread: int) -> None:
    """Take an exception that was set in this thread and not yet raised: it must not appear in the code that follows.

    It is raised here once more and caught. Without that, Python 3.11 would believe for ever that an exception waits:
    it would look for it at every call, and a function that is traced (by a debugger, or for coverage) would never
    begin.
    """
    try:
        _raise_in(thread, _TooLate)
        while True:
            pass
    except _TooLate:
        return


@contextmanager
def torch_as_before(function: str) -> Iterator[None]:
    """Restore PyTorch's gradient switch and default dtype after the block, and say what the function had changed."""
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
            _say(function, "torch's gradients (set_grad_enabled)")
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
            _say(function, "torch's default dtype (set_default_dtype)")


def _say(function: str, what: str) -> None:
    if (function, what) not in _SAID:
        _SAID.add((function, what))
        _logger.warning(f"{function} changed {what} for the whole process; it is as before again")


R = TypeVar("R")
# Seconds that `close` waits for the cancelled calls to end.
_ENDING = 10.0


class CallLoop:
    """A thread that runs coroutines.

    Any other thread may start one in it. A time limit in a coroutine covers the whole call.
    """

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
        """Cancel every call, and end the thread.

        Safe to call again. If a call blocks the thread, `close` stops waiting for it.
        """
        if self._closed:
            return
        self._closed = True
        self._stop()
        self.thread.join(_ENDING)


async def _serve(started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Keep the loop running until the event is set.

    `asyncio.run` then cancels the remaining calls, and closes the loop.
    """
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


# Seconds after the time limit in which the loop may cancel the functions.
GRACE = 1.0


class Interrupted(Exception):
    """A function raised KeyboardInterrupt. In a task of the loop, KeyboardInterrupt itself would end the loop."""


# Reward functions, and tools and environments that are coroutine functions, share one loop.
USERS_LOOP = LoopThread("lockstep-coroutines")


def run_coroutine(coroutine: Coroutine[Any, Any, T], timeout: float, names: str) -> T:
    """Run a coroutine that has its own time limit, and return its result.

    Args:
        timeout: the time limit of the coroutine, in seconds.
        names: names of the functions that it awaits, for the error.

    Raises:
        InputError: a function blocked the loop, so that it was not cancelled in time. The thread continues in the
            background. The process can end without it.
    """
    loop = USERS_LOOP.get()
    found = asyncio.run_coroutine_threadsafe(_guarded(coroutine), loop)
    try:
        return found.result(timeout + GRACE)
    except Interrupted as error:
        raise KeyboardInterrupt from error
    except TimeoutError as error:
        if found.done():
            raise
        found.cancel()
        USERS_LOOP.leave(loop)
        raise InputError(
            f"reward function {names} did not give way to its event loop for {timeout:g} s; await what takes "
            f"long, or make it a "
            "plain function"
        ) from error
    except BaseException:
        # Ctrl-C, while this thread waited.
        found.cancel()
        raise


def is_coroutine_function(function: Any) -> bool:
    """Whether a call returns a coroutine: for a coroutine function, an object with such a `__call__`, or a partial of
    either.
    """
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def unwrapped(function: Any) -> Any:
    """The function inside a partial; any other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


async def _guarded(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except KeyboardInterrupt as error:
        raise Interrupted from error
