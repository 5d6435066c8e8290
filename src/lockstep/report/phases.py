"""Seconds by phase of a step. State of one run, read by logs, the live view and the summary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("generate", "rewards", "reference", "forward_backward", "optimizer", "sync", "verify")


class PhaseClock:
    """Accumulates wall seconds a phase since the last `take`."""

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
        """Leave a block (an evaluation) out of the account."""
        recent, start = dict(self._recent), time.perf_counter()
        try:
            yield
        finally:
            self._recent = recent
            self._since += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, with all wall seconds under `step`; then start again."""
        now = time.perf_counter()
        recent = {**self._recent, "step": now - self._since}
        self._recent, self._since = dict.fromkeys(PHASES, 0.0), now
        return recent
