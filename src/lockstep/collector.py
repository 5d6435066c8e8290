"""Keeps Python's garbage collector off while a program starts.

PyTorch, transformers and vLLM make a million objects at their import, and nearly all of them stay. The collector looks
through all objects again and again meanwhile, which is a fifth of the time of the imports.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Within the block nothing is collected. Objects that were made until its end are never looked at again (`gc.freeze`).

    Such blocks may be nested. A collector that was off before stays off.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if on:
            gc.enable()
