"""Seconds per phase of a step. It belongs to one run; the logs, the live view and the summary read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("generate", "rewards", "reference", "forward_backward", "optimizer", "sync", "verify")


class PhaseClock:
    """Accumulates wall seconds per phase since the last `take`."""

    def __init__(self) -> None:
        self._recent = dict.fromkeys(PHASES, 0.0)
        self._open: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def start(self, name: str) -> None:
        self._open[name] = time.perf_counter()

    def stop(self, name: str) -> None:
        self._recent[name] += time.perf_counter() - self._open.pop(name)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count the time of a block (an evaluation)."""
        recent, start = dict(self._recent), time.perf_counter()
        try:
            yield
        finally:
            self._recent = recent
            self._since += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, and all wall seconds under `step`. Then start again from zero."""
        now = time.perf_counter()
        recent = {**self._recent, "step": now - self._since}
        self._recent, self._since = dict.fromkeys(PHASES, 0.0), now
        return recent
