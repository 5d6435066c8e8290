"""Seconds by phase of a step. State of one run, read by logs, the live view and the summary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("generate", "rewards", "forward_backward", "optimizer", "sync", "verify")


class PhaseClock:
    """Accumulates wall seconds a phase: since the last `take`, and over the whole run."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(PHASES, 0.0)
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
        seconds = time.perf_counter() - self._open.pop(name)
        self.total[name] += seconds
        self._recent[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, with all wall seconds under `step`; then start again."""
        now = time.perf_counter()
        recent = {**self._recent, "step": now - self._since}
        self._recent, self._since = dict.fromkeys(PHASES, 0.0), now
        return recent
