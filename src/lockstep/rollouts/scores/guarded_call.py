"""Calls a user's plain function within a time limit, and undoes what it changed for the whole process.

Reward functions, tools and environments are called with it. A function runs in the caller's thread, because functions
may use signals of their own (math-verify does), which only the main thread can.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch

from lockstep.errors import InputError
from lockstep.report.waits import waiting

_logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two attempts to end a function that ignores the first one, and the number of attempts after which it is said.
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
        seconds: the time limit. In the main thread it ends everything but C code that never returns to Python, and says so after
            some seconds; in another thread it ends Python code, but no call that blocks.
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
                    f"{what} took longer than {seconds:g} s and cannot be ended: it is in code that returns to Python for no "
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
    """Let a thread raise an error when it next executes Python code. None: nothing that waits for this is raised any more."""
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)


def _withdraw(thread: int) -> None:
    """Take back an exception that a thread does not raise, because it waits in code that does not return to Python.

    As long as it waits there, every other thread of Python 3.11 would look for it at every call (`_take_what_was_raised`).
    """
    _raise_in(thread, None)
    _take_what_was_raised(threading.get_ident())


def _take_what_was_raised(thread: int) -> None:
    """Take an exception that was set in this thread and not yet raised: it must not appear in the code that follows.

    It is raised here once more and caught. Without that, Python 3.11 would believe for ever that an exception waits: it would look
    for it at every call, and a function that is traced (by a debugger, or for coverage) would never begin.
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
