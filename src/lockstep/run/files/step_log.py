"""The figures that a run logs about its steps: means or sums over the steps since the last log, and the seconds they took.

The figures come from the trainer's loop. They go to `transformers.Trainer.log`, which sends them to trackers, the metrics file
and the report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lockstep.report.phases import PhaseClock

# Figures that are summed over the steps of a log, like the seconds.
_COUNTS = (
    "parity/checked_tokens",
    "parity/aside_tokens",
    "sampling/tokens",
    "rewards/unscored_generations",
)
# Means over tokens, each with the figure that counts its tokens. Steps can have different numbers of tokens.
_BY_TOKEN = {"parity/mean_abs_gap": "parity/checked_tokens", "parity/k3": "parity/checked_tokens"}
# Every step notes this figure exactly once.
_OF_A_STEP = "parity/checked_tokens"


class StepLog:
    """Figures since the last log.

    Attributes:
        noted: the figures since the last log, by name, one entry per note.
        taken: the figures of the last log, without seconds.
    """

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self.noted: dict[str, list[float]] = defaultdict(list)
        self._latest: dict[str, float] = {}

    def note(self, figures: Mapping[str, float]) -> None:
        """Add the figures of a step or a generation."""
        for name, value in figures.items():
            self.noted[name].append(value)
        self._latest.update(figures)

    def latest(self) -> dict[str, float]:
        """The last figure of each name. `take` and `clear` do not remove these figures."""
        return dict(self._latest)

    def values(self, name: str) -> list[float]:
        """All figures that were noted under a name since the last log, one entry per note."""
        return list(self.noted.get(name, ()))

    def take(self, clock: PhaseClock) -> dict[str, float]:
        """Means and sums of the notes, and seconds: `time/…` per phase, and `step_time` per step. Then clear the notes."""
        figures = self.taken = {name: self._figure(name, values) for name, values in self.noted.items() if values}
        seconds, steps = clock.take(), len(self.noted.get(_OF_A_STEP, ()))
        self.noted.clear()
        times = {f"time/{name}": value for name, value in seconds.items()}
        return figures | times | {"step_time": seconds["step"] / max(steps, 1)}

    def _figure(self, name: str, values: list[float]) -> float:
        if name in _COUNTS or name.endswith("/unscored"):
            return sum(values)
        weights = self.noted.get(_BY_TOKEN.get(name, ""), [1.0] * len(values))
        return sum(w * v for w, v in zip(weights, values, strict=True)) / max(sum(weights), 1.0)

    def clear(self) -> None:
        """Remove all notes since the last log."""
        self.noted.clear()
