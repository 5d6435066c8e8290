"""Runs coroutine reward functions concurrently and waits for them, with a time limit.

`rollouts/scores/rewards.py` calls it. The functions run in a loop of their own in another thread. So a function that blocks this
loop is waited for no longer than its time, and the calling thread may have a running loop (as in a notebook).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, TypeVar

from lockstep.errors import InputError

T = TypeVar("T")

# Seconds after the time limit in which the loop may cancel the functions and end.
_GRACE = 1.0


def run_coroutine(coroutine: Coroutine[Any, Any, T], timeout: float, names: str) -> T:
    """Run a coroutine that has its own time limit, and return its result.

    Args:
        timeout: the time limit of the coroutine, in seconds.
        names: names of the functions that it awaits, for the error.

    Raises:
        InputError: a function blocked the loop, so that it was not cancelled in time. The thread continues in the background. The
            process can end without it.
    """
    found: Future[T] = Future()
    threading.Thread(target=_settle, args=(found, coroutine, copy_context()), daemon=True).start()
    try:
        return found.result(timeout + _GRACE)
    except TimeoutError as error:
        raise InputError(
            f"reward function {names} did not give way to its event loop for {timeout:g} s; await what takes long, or make it a "
            "plain function"
        ) from error


def is_coroutine_function(function: Any) -> bool:
    """Whether a call returns a coroutine: for a coroutine function, an object with such a `__call__`, or a partial of either."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def unwrapped(function: Any) -> Any:
    """The function inside a partial; any other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _settle(found: Future[T], coroutine: Coroutine[Any, Any, T], context: Context) -> None:
    try:
        found.set_result(context.run(asyncio.run, coroutine))
    except BaseException as error:  # noqa: BLE001 (the waiting thread raises it)
        found.set_exception(error)
