"""A call that blocks beyond its time limit, in a thread that cannot be ended, leaves the other threads as they were."""

from __future__ import annotations

import threading

import pytest
from python_steps import steps_of_python

from lockstep.threads import OutOfTime, ended_within


@pytest.mark.timeout(60)
def test_a_traced_function_begins_while_a_call_in_another_thread_blocks() -> None:
    release, late = threading.Event(), threading.Event()

    def blocks() -> None:
        try:
            # A wait of the C library: the thread executes no Python code.
            ended_within(0.1, "a tool", lambda: release.wait(50))
        except OutOfTime:
            late.set()

    thread = threading.Thread(target=blocks, daemon=True)
    thread.start()
    assert not late.wait(0.6)
    counts = {steps_of_python(lambda: sum(range(10))) for _ in range(20)}
    release.set()
    assert len(counts) == 1
    thread.join(30)
    assert not thread.is_alive()
