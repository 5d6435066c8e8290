"""Measures the seconds per phase of a step.

The host gives a GPU its work ahead of time. On the host's clock the seconds of that work would belong to the phase in
which the host next waits for it. So on a GPU a phase lasts from one mark to another in the GPU's own queue of work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

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


class Mark(Protocol):
    """A moment in a GPU's queue of work, such as a `torch.cuda.Event`, which the GPU has perhaps not come to yet."""

    def query(self) -> bool:
        """Whether the GPU has come to it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to a later one. The GPU has come to both."""


class PhaseClock:
    """Accumulates seconds per phase since the last `take`.

    Args:
        mark: puts a mark into the queue of the device that computes, and returns it. None: the host computes, and its
            clock tells the seconds.
    """

    def __init__(self, mark: Callable[[], Mark] | None = None) -> None:
        self._recent = dict.fromkeys(PHASES, 0.0)
        self._open: dict[str, float] = {}
        self._mark = mark
        # The mark at the beginning of each open phase, and the closed phases whose end the device had not come to yet.
        self._begun: dict[str, Mark] = {}
        self._ahead: deque[tuple[str, Mark, Mark]] = deque()
        self._since = time.perf_counter()
        self._answered = self._asked = self._tokens = 0

    def counted(self, asked: int) -> Callable[[Any], None]:
        """A function of a finished rollout that counts it, out of the requested ones, for `progress`."""
        self._answered, self._asked, self._tokens = 0, asked, 0

        def answered(rollout: Any) -> None:
            self._answered += 1
            self._tokens += len(rollout.token_ids)

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
        except BaseException:
            # A device that has failed takes no mark, and would hide the error.
            self._by_host(name)
            raise
        self.stop(name)

    def start(self, name: str) -> None:
        self._open[name] = time.perf_counter()
        if self._mark is not None:
            self._begun[name] = self._mark()

    def stop(self, name: str) -> None:
        if self._mark is None:
            self._by_host(name)
            return
        self._ahead.append((name, self._begun.pop(name), self._mark()))
        del self._open[name]
        self._settle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count the seconds of a block (an evaluation)."""
        kept, start = (dict(self._recent), self._ahead.copy()), time.perf_counter()
        try:
            yield
        finally:
            self._recent, self._ahead = kept
            self._since += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, and all wall seconds under `step`. Then it starts again from zero.

        It does not wait for a GPU: a phase whose end the GPU has not come to is told by a later call.
        """
        self._settle()
        now = time.perf_counter()
        recent = {**self._recent, "step": now - self._since}
        self._recent, self._since = dict.fromkeys(PHASES, 0.0), now
        return recent

    def _by_host(self, name: str) -> None:
        self._begun.pop(name, None)
        self._recent[name] += time.perf_counter() - self._open.pop(name)

    def _settle(self) -> None:
        """Add the seconds of the phases whose end the device has come to."""
        while self._ahead and self._ahead[0][2].query():
            name, begin, end = self._ahead.popleft()
            self._recent[name] += begin.elapsed_time(end) / 1000
