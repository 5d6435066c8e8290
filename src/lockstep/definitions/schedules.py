"""Learning-rate schedules as formulas of the step, or of the metrics of evaluations.

The scheduler's rates are compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def rate_factor(schedule: str, step: int, warmup: int, total: int) -> float | None:
    """The factor by which a schedule multiplies the learning rate.

    Args:
        schedule: its name in transformers: `constant`, `constant_with_warmup`, `linear` or `cosine`.
        step: number of optimizer steps before this one.
        warmup: steps of linear warm-up from 0. `constant` has none.
        total: steps of the run.

    Returns:
        The factor; None if this function does not know the schedule.
    """
    if schedule == "constant":
        return 1.0
    if schedule not in ("constant_with_warmup", "linear", "cosine"):
        return None
    if step < warmup:
        return step / warmup
    if schedule == "constant_with_warmup":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


class PlateauSchedule:
    """The rates of `reduce_lr_on_plateau`, from the metrics that it was given.

    After each metric: if more than `patience` metrics in a row were not better than the best one before, every rate is
    multiplied by `factor`. The next `cooldown` metrics do not count as such. A rate stays at or above its `min_lr`, and stays as
    it is if it would change by `eps` or less.

    Args:
        settings: arguments of torch's `ReduceLROnPlateau`; those that are missing have torch's defaults.
        rates: the rates before the first metric, one per group of the optimizer.
        best, bad, waiting: what earlier metrics have left: the best of them, how many since were not better, and how many of the
            following do not count. None for `best`: there were none.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        rates: Sequence[float],
        *,
        best: float | None = None,
        bad: int = 0,
        waiting: int = 0,
    ) -> None:
        known = {
            "mode": "min",
            "factor": 0.1,
            "patience": 10,
            "threshold": 1e-4,
            "threshold_mode": "rel",
            "cooldown": 0,
        }
        self._of = {**known, "min_lr": 0.0, "eps": 1e-8, **settings}
        self.rates = list(rates)
        self._best, self._bad, self._waiting = best, bad, waiting

    def after(self, metric: float) -> None:
        """Take a metric. `rates` are then those of the following steps."""
        of = self._of
        if self._is_better(metric):
            self._best, self._bad = metric, 0
        else:
            self._bad += 1
        if self._waiting > 0:
            self._waiting, self._bad = self._waiting - 1, 0
        if self._bad <= of["patience"]:
            return
        self._bad, self._waiting = 0, of["cooldown"]
        lowest = of["min_lr"] if isinstance(of["min_lr"], list | tuple) else [of["min_lr"]] * len(self.rates)
        for index, rate in enumerate(self.rates):
            lower = max(rate * of["factor"], lowest[index])
            if rate - lower > of["eps"]:
                self.rates[index] = lower

    def _is_better(self, metric: float) -> bool:
        if math.isnan(metric):
            return False
        if self._best is None or math.isinf(self._best):
            # An infinite best is that of a scheduler that has seen no metric.
            return not math.isinf(metric) or (metric < 0) == (self._of["mode"] == "min")
        sign = -1.0 if self._of["mode"] == "min" else 1.0
        margin = self._of["threshold"]
        limit = self._best * (1 + sign * margin) if self._of["threshold_mode"] == "rel" else self._best + sign * margin
        return sign * (metric - limit) > 0
