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
import locale
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch

from lockstep.errors import InputError, LockstepError
from lockstep.progress import waiting

_logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two attempts to end a function that ignores the first one; the number of attempts after which it is
# said, and after which the run ends.
_AGAIN, _ATTEMPTS, _LAST = 1.0, 10, 30
# The exit code of a run that a function of the user's has ended.
_USERS_FAULT = 2
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
    """The result of a call of a reward function or a judge. What it has changed of the process is put back.

    Raises:
        TooSlow: the call took longer than the time limit (`ended_within`).
    """
    try:
        with waiting(what, seconds), process_as_before(what):
            return ended_within(seconds, what, call)
    except OutOfTime as error:
        raise TooSlow(f"{what} took longer than {seconds:g} s (reward_timeout)") from error


def ended_within(seconds: float, what: str, call: Callable[[], T], *, awaited: bool = True) -> T:
    """The result of a call.

    Args:
        seconds: the time limit. In the main thread it ends Python code and calls that block; in another thread it ends
            Python code, but no call that blocks.
        what: what is called, for messages.
        awaited: whether the run can only wait for a call that cannot be ended. Then the process ends, half a minute
            after the limit, because neither the run nor the call would.

    Raises:
        OutOfTime: the call took longer.
    """
    process = os.getpid()
    with _limit(seconds, what, awaited) as is_late:
        try:
            return call()
        except _TooLate:
            is_late.set()
        finally:
            if os.getpid() != process:
                # The call has forked, and the copy came back: it would go on with the run a second time.
                _leave_copy(what)
    raise OutOfTime


def _leave_copy(what: str) -> NoReturn:
    error = sys.exception()
    why = "" if error is None else f" ({type(error).__name__}: {error})"
    _logger.error(f"{what} has forked, and did not end the copy of the process{why}: the copy ends here")
    os._exit(1)


def uses_signal(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, says that only the main thread handles signals."""
    while error is not None:
        if isinstance(error, ValueError) and str(error).startswith("signal only works in main thread"):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _limit(seconds: float, what: str, awaited: bool) -> Iterator[threading.Event]:
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
            if awaited and attempts == _ATTEMPTS:
                rest = f"If it does not return within {(_LAST - _ATTEMPTS) * _AGAIN:g} s, the run ends"
                _logger.warning(f"{_endless(what, seconds)}. {rest}")
            if awaited and attempts == _LAST:
                _end_process(_endless(what, seconds))
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


def _endless(what: str, seconds: float) -> str:
    why = "it catches every exception, or is in code that does not return to Python"
    return f"{what} took longer than {seconds:g} s and cannot be ended: {why}"


def _end_process(why: str) -> None:
    """End this process at once: the thread that could end it otherwise is in a call that does not end."""
    _logger.error(f"{why}. The run ends here; its checkpoints stay")
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_USERS_FAULT)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an error when it next executes Python code. None: raise nothing any more."""
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


class _Kind(NamedTuple):
    """Something of a process or a thread that a user's function can change, how it is read and put back."""

    name: str
    read: Callable[[], Any]
    # None: a change is only told, because what the function needs later may depend on it.
    put_back: Callable[[Any], object] | None


# The module's own function without the search in an enum, which takes 2 µs.
_handler_of: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD")
_WATCHED = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _go_to(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _locale() -> str:
    return locale.setlocale(locale.LC_ALL)


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


def _device() -> Any:
    # `torch.get_default_device` makes a tensor to see it: 3 µs.
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _handlers() -> tuple[Any, ...]:
    return tuple([_handler_of(number) for number in _WATCHED])


def _handle(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(_WATCHED, handlers, strict=True):
        # None: code that is not Python's has set the handler.
        if handler is not None and _handler_of(number) is not handler:
            signal.signal(number, handler)


def _has_alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _streams() -> tuple[Any, Any]:
    return sys.stdout, sys.stderr


def _print_to(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _variables() -> dict[Any, Any]:
    # A copy by the public way decodes every name: 20 µs.
    return dict(vars(os.environ)["_data"])


# What belongs to the thread of a call, or what only the main thread changes safely.
_OF_THREAD = (
    _Kind("torch's gradients (set_grad_enabled)", torch.is_grad_enabled, torch.set_grad_enabled),
    _Kind("torch's default dtype (set_default_dtype)", torch.get_default_dtype, torch.set_default_dtype),
    _Kind("torch's default device (set_default_device)", _device, torch.set_default_device),
)
_OF_MAIN_THREAD = (
    *_OF_THREAD,
    # Before the handlers: an alarm without its handler would end the process.
    _Kind("the alarm (signal.alarm)", _has_alarm, lambda on: on or signal.setitimer(signal.ITIMER_REAL, 0)),
    _Kind("handlers of signals (signal.signal)", _handlers, _handle),
    _Kind("sys.stdout or sys.stderr", _streams, _print_to),
    _Kind("environment variables (os.environ)", _variables, None),
)
# What all threads share, and functions in any thread change.
_SHARED = (
    _Kind("the working directory (os.chdir)", _folder, _go_to),
    _Kind("the locale (locale.setlocale)", _locale, _set_locale),
)
# The calls that are under way, with the time until which each may run, and the process before the first of them.
_calls: dict[object, float] = {}
_before: list[Any] = []
_calling = threading.Lock()


@contextmanager
def process_as_before(function: str) -> Iterator[None]:
    """After the block, this thread and the process are as before. What the function has changed is said, once."""
    is_main = threading.current_thread() is threading.main_thread()
    kinds = _OF_MAIN_THREAD if is_main else _OF_THREAD
    before = [kind.read() for kind in kinds]
    try:
        with folder_as_before(function):
            yield
    finally:
        for kind, value in zip(kinds, before, strict=True):
            _put_back(function, kind, value)


@contextmanager
def folder_as_before(function: str, limit: float = math.inf) -> Iterator[None]:
    """After the block, working directory and locale are as before.

    Where calls of several threads overlap, both are put back when the last of them ends: a call that still runs may
    need what it has set. The others wait for this one for at most `limit` seconds.
    """
    call = object()
    with _calling:
        if not _are_running():
            _before[:] = [kind.read() for kind in _SHARED]
        _calls[call] = time.monotonic() + limit
    try:
        yield
    finally:
        with _calling:
            is_awaited = _calls.pop(call, 0.0) > time.monotonic()
            if is_awaited and not _are_running():
                for kind, value in zip(_SHARED, _before, strict=True):
                    _put_back(function, kind, value)


def _are_running() -> bool:
    now = time.monotonic()
    for call in [call for call, end in _calls.items() if end <= now]:
        del _calls[call]
    return bool(_calls)


def _put_back(function: str, kind: _Kind, before: Any) -> None:
    now = kind.read()
    if now == before:
        return
    if kind.put_back is None:
        _say(function, kind.name, "which stay so")
        return
    try:
        kind.put_back(before)
    except (OSError, ValueError, locale.Error) as error:
        _say(function, kind.name, f"which cannot be put back ({type(error).__name__}: {error})")
    else:
        _say(function, kind.name, "it is as before again")


def _say(function: str, what: str, now: str) -> None:
    if (function, what) not in _SAID:
        _SAID.add((function, what))
        joint = ";" if now.startswith("it") else ","
        _logger.warning(f"{function} changed {what} for the whole process{joint} {now}")


R = TypeVar("R")
_Started = tuple[asyncio.AbstractEventLoop, asyncio.Event]
# Seconds that `close` waits for the cancelled calls to end.
_ENDING = 10.0


class CallLoop:
    """A thread that runs coroutines for any other thread. A time limit in a coroutine covers the whole call."""

    def __init__(self, name: str = "lockstep-calls") -> None:
        self._closed = False
        started: concurrent.futures.Future[_Started] = concurrent.futures.Future()
        # A daemon thread: when the program ends, it does not wait for a call that blocks this thread.
        self.thread = threading.Thread(target=asyncio.run, args=(_serve(started),), name=name, daemon=True)
        self.thread.start()
        self.loop, stopped = started.result()
        # If the owner is freed without `close`, the thread ends too, and its files are closed.
        self._stop = weakref.finalize(self, self.loop.call_soon_threadsafe, stopped.set)
        self._stop.atexit = False

    def start(self, call: Coroutine[Any, Any, T], check: Callable[[T], R]) -> Pending[T, R]:
        """Begin a call. `check` makes the result of its answer, in the thread that waits for the result."""
        if self._closed:
            call.close()
            raise LockstepError(CLOSED)
        return Pending(asyncio.run_coroutine_threadsafe(call, self.loop), check)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call and wait for its result."""
        return self.start(call, lambda found: found).result()

    def close(self) -> None:
        """Cancel every call, and end the thread, unless a call blocks it. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        self.thread.join(_ENDING)


async def _serve(started: concurrent.futures.Future[_Started]) -> None:
    """Keep the loop running until the event is set. `asyncio.run` then cancels the remaining calls, and closes it."""
    stopped = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stopped))
    await stopped.wait()


CLOSED = "the engine was closed while it was being used"


class Pending(Generic[T, R]):
    """A call in progress, and what makes the result of its answer."""

    def __init__(self, future: concurrent.futures.Future[T], check: Callable[[T], R]) -> None:
        self._future, self._check = future, check

    def result(self) -> R:
        """Wait for the result. If the wait is interrupted, the call is cancelled."""
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
    """A loop that is started when it is first needed. A forked process gets another one."""

    def __init__(self, name: str) -> None:
        # What the next call gets; None: a new one.
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
    """The result of a coroutine that has its own time limit, and awaits functions of these names.

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
            f"reward function {names} did not give way to its event loop for {timeout:g} s; await what takes long, "
            "or make it a plain function"
        ) from error
    except BaseException:
        # Ctrl-C, while this thread waited.
        found.cancel()
        raise


def is_coroutine_function(function: Any) -> bool:
    """Whether a call returns a coroutine: of a coroutine function, an object with such a `__call__`, or a partial."""
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
