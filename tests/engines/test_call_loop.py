"""The thread that runs coroutines for other threads."""

from __future__ import annotations

import gc
import threading

from lockstep.threads import CallLoop


def test_a_loop_that_nobody_closed_ends_its_thread_and_closes_its_files() -> None:
    made = CallLoop("dropped")
    loop, thread = made.loop, made.thread
    assert threading.Thread.is_alive(thread)
    del made
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert loop.is_closed()


def test_a_loop_that_is_closed_ends_its_thread_too_and_may_be_closed_twice() -> None:
    made = CallLoop("closed")
    made.close()
    made.close()
    assert not made.thread.is_alive()
    assert made.loop.is_closed()
