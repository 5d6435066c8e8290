"""Measures the seconds per phase of a step. One clock belongs to one run; the logs, the live view and the summary read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("generate", "rewards", "reference", "forward_backward", "optimizer", "sync", "verify")
_WORDS = {
    "generate": "sampling",
    "rewards": "scoring completions",
    "reference": "reference model",
    "forward_backward": "learning",
    "optimizer": "optimizer",
    "sync": "sending weights to the engine",
    "verify": "checking proofs",
}


class PhaseClock:
    """Accumulates wall seconds per phase since the last `take`."""

    def __init__(self) -> None:
        self._recent = dict.fromkeys(PHASES, 0.0)
        self._open: dict[str, float] = {}
        self._since = time.perf_counter()
        self._answered = self._asked = self._tokens = 0

    def counted(self, asked: int, then: Callable[[Any], None] | None = None) -> Callable[[Any], None]:
        """Returns a function that counts rollouts for `progress`. The driver calls it with each finished rollout.

        Args:
            asked: number of requested rollouts.
            then: another function to call with each rollout.
        """
        self._answered, self._asked, self._tokens = 0, asked, 0

        def answered(rollout: Any) -> None:
            self._answered += 1
            self._tokens += len(rollout.token_ids)
            if then is not None:
                then(rollout)

        return answered

    def progress(self) -> str:
        """The current phase in words, with counters and seconds; empty between phases. Any thread may call this."""
        phases = list(self._open.items())
        if not phases:
            return ""
        name, since = phases[-1]
        seconds = time.perf_counter() - since
        words = [_WORDS[name]]
        if name == "generate" and self._asked:
            words.append(f"{self._answered}/{self._asked} completions")
            if self._tokens:
                words.append(f"{self._tokens / max(seconds, 1e-9):.0f} tokens/s")
        return " · ".join([*words, f"{seconds:.0f} s"])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a phase."""
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
        """Do not count the seconds of a block (an evaluation)."""
        recent, start = dict(self._recent), time.perf_counter()
        try:
            yield
        finally:
            self._recent = recent
            self._since += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, and all wall seconds under `step`. Then the clock starts again from zero."""
        now = time.perf_counter()
        recent = {**self._recent, "step": now - self._since}
        self._recent, self._since = dict.fromkeys(PHASES, 0.0), now
        return recent
