"""Counts what Python does in a piece of work, as a debugger would see it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def steps_of_python(work: Callable[[], object]) -> int:
    """How many instructions of Python's a piece of work takes; what NumPy does within one of them is not counted."""
    count = 0

    def traced(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    # What other tests have left is collected before, and not counted.
    gc.collect()
    gc.disable()
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
