"""Runs coroutine reward functions concurrently and waits for them, with a time limit.

All calls share one event loop, as in TRL: the user's clients and semaphores belong to the loop in which they were
first used. The loop runs in a thread of its own. So a function that blocks it is waited for no longer than its time,
and the calling thread may have a running loop (as in a notebook).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

from lockstep.errors import InputError
from lockstep.rollouts.loop_thread import LoopThread

T = TypeVar("T")

# Seconds after the time limit in which the loop may cancel the functions.
_GRACE = 1.0


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
        InputError: a function blocked the loop, so that it was not cancelled in time. The thread continues in the background. The
            process can end without it.
    """
    loop = USERS_LOOP.get()
    found = asyncio.run_coroutine_threadsafe(_guarded(coroutine), loop)
    try:
        return found.result(timeout + _GRACE)
    except Interrupted as error:
        raise KeyboardInterrupt from error
    except TimeoutError as error:
        if found.done():
            raise
        found.cancel()
        USERS_LOOP.leave(loop)
        raise InputError(
            f"reward function {names} did not give way to its event loop for {timeout:g} s; await what takes long, or make it a "
            "plain function"
        ) from error
    except BaseException:
        # Ctrl-C, while this thread waited.
        found.cancel()
        raise


def is_coroutine_function(function: Any) -> bool:
    """Whether a call returns a coroutine: for a coroutine function, an object with such a `__call__`, or a partial of either."""
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
