"""What a run logs of its steps: figures of each since the last log, averaged or counted, with the seconds they took.

Comes from: the trainer's loop. Goes to: `transformers.Trainer.log`, and so to trackers, the metrics file and the report.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.report.phases import PhaseClock

# Summed over the steps of a log, like the seconds.
_COUNTS = ("parity/checked_tokens", "sampling/tokens", "rewards/unscored")
# Means over tokens that these count: not every step has as many.
_BY_TOKEN = {"parity/mean_abs_gap": "parity/checked_tokens", "parity/k3": "parity/checked_tokens"}
# Noted by every step.
_OF_A_STEP = "parity/checked_tokens"


class StepLog:
    """Figures since the last log."""

    def __init__(self) -> None:
        self._noted: dict[str, list[float]] = {}
        self._latest: dict[str, float] = {}

    def note(self, figures: Mapping[str, float]) -> None:
        """Take in figures of a step or a generation."""
        for name, value in figures.items():
            self._noted.setdefault(name, []).append(value)
        self._latest.update(figures)

    def latest(self) -> dict[str, float]:
        """The last figure of each name; taking or clearing the log does not forget them."""
        return dict(self._latest)

    def values(self, name: str) -> list[float]:
        """What was noted under a name since the last log, one entry a note."""
        return list(self._noted.get(name, ()))

    def take(self, clock: PhaseClock) -> dict[str, float]:
        """Means and counts of what was noted, and seconds: `time/…` by phase, `step_time` the mean of a step; then start again."""
        figures = {name: self._figure(name, values) for name, values in self._noted.items()}
        seconds, steps = clock.take(), len(self._noted.get(_OF_A_STEP, ()))
        self._noted.clear()
        times = {f"time/{name}": value for name, value in seconds.items()}
        return figures | times | {"step_time": seconds["step"] / max(steps, 1)}

    def _figure(self, name: str, values: list[float]) -> float:
        if name in _COUNTS:
            return sum(values)
        weights = self._noted.get(_BY_TOKEN.get(name, ""), [1.0] * len(values))
        return sum(w * v for w, v in zip(weights, values, strict=True)) / max(sum(weights), 1.0)

    def clear(self) -> None:
        """Forget what was noted."""
        self._noted.clear()
