"""Runs coroutine reward functions together and waits for them, within a limit.

Comes from: `rollouts/rewards.py`. A thread whose event loop runs already (a notebook's) cannot run a second one: there the
functions get a loop of their own in another thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, TypeVar

from lockstep.errors import InputError

T = TypeVar("T")

# Seconds beyond the functions' own limit in which their loop may cancel them and come back.
_GRACE = 1.0


def run_coroutine(coroutine: Coroutine[Any, Any, T], timeout: float, names: str) -> T:
    """The result of a coroutine that ends by itself within a time limit, wherever it is called.

    Args:
        timeout: the coroutine's own limit, in seconds.
        names: the functions that it awaits, for the error.

    Raises:
        InputError: beside a running loop: a function blocked the new loop, which could not cancel it in time. Its thread goes on
            in the background and does not keep the process from ending.
    """
    if not _in_a_loop():
        return asyncio.run(coroutine)
    found: Future[T] = Future()
    threading.Thread(target=_settle, args=(found, coroutine, copy_context()), daemon=True).start()
    try:
        return found.result(timeout + _GRACE)
    except TimeoutError as error:
        raise InputError(
            f"reward function {names} did not give way to its event loop for {timeout:g} s; await what takes long, or make it a "
            "plain function"
        ) from error


def _settle(found: Future[T], coroutine: Coroutine[Any, Any, T], context: Context) -> None:
    try:
        found.set_result(context.run(asyncio.run, coroutine))
    except BaseException as error:  # noqa: BLE001 (whoever waits raises it)
        found.set_exception(error)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
