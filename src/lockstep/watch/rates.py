"""The learning rates of a step, from the schedule's formula where it is written in `definitions/schedules.py`.

Most schedules follow the steps. Two of transformers follow the metrics of evaluations (`reduce_lr_on_plateau`, `greedy`).

Proof `learning_rate`.
Shows: the rates of the optimizer are the config's, times the schedule's formula (constant, linear, cosine, with
warm-up); `reduce_lr_on_plateau`: its formula, from the metrics that it was given; for other schedules they are the
scheduler's, at the right step or after the right number of metrics.
Does not show: that a schedule without a formula here is right; the first step of a resumed run is compared with the
scheduler.
When: every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.definitions.schedules import PlateauSchedule, rate_factor
from lockstep.errors import ProofError
from lockstep.watch.optimizer_settings import OptimizerSettings


@dataclass(slots=True)
class Rates:
    """The learning rates of a run.

    Attributes:
        scheduler: the run's scheduler.
        schedule: its name; None: the user made the scheduler, or gave it options, so that no formula is known.
        warmup, total: as in `rate_factor`.
        start: number of steps before training began; above 0 for a resumed run.
        settings: the optimizer's settings. They have the rates before the schedule, and those that a user has set.
        metrics: number of metrics that the schedule has taken; None: it follows the steps.
        plateau: the formula of a schedule that follows metrics; None: it follows the steps, or has no formula here.
    """

    scheduler: Any
    schedule: str | None
    warmup: int
    total: int
    start: int
    settings: OptimizerSettings
    metrics: int | None = None
    plateau: PlateauSchedule | None = None

    def at(self, step: int) -> list[float]:
        """The learning rate of each group in a step.

        Args:
            step: number of steps before this one.

        Raises:
            ProofError: the optimizer has other rates.
        """
        if self.metrics is not None:
            return [self._of_group(index, due, step) for index, due in enumerate(self._by_metric(step))]
        # The first step of a resumed run has the rate that its checkpoint was written with, even if the run is longer now.
        resumed = 0 < step == self.start
        formula = None if resumed else self.schedule
        factor = None if formula is None else rate_factor(formula, step, self.warmup, self.total)
        if factor is None:
            rates = [float(rate) for rate in self.scheduler.get_last_lr()]
            taken = getattr(self.scheduler, "last_epoch", step)
            if taken != step:
                raise _wrong(f"the schedule has taken {taken} steps before optimizer step {step + 1}, not {step}")
        else:
            rates = [first * factor for first in self.settings.first_rates()]
        return [self._of_group(index, due, step) for index, due in enumerate(rates)]

    def _by_metric(self, step: int) -> list[float]:
        taken = getattr(self.scheduler, "last_epoch", self.metrics)
        if taken != self.metrics:
            raise _wrong(f"the schedule has taken {taken} metrics before optimizer step {step + 1}, not {self.metrics}")
        return list(self.plateau.rates) if self.plateau else [float(rate) for rate in self.scheduler.get_last_lr()]

    def before_metric(self) -> None:
        """Note the learning rates from which a schedule goes on that follows metrics. A user may have set them."""
        if self.plateau is not None:
            found = map(self.settings.rate_set, range(len(self.plateau.rates)))
            self.plateau.rates = [
                r if given is None else given for r, given in zip(self.plateau.rates, found, strict=True)
            ]

    def after_metric(self, metric: float) -> None:
        """Note a metric that was given to the schedule."""
        if self.metrics is not None:
            self.metrics += 1
        if self.plateau is not None:
            self.plateau.after(metric)

    def in_step(self, rates: list[float]) -> list[float]:
        """The learning rates of the latest step. A callback may have set others after `at`."""
        return self.settings.rates_of_step(rates)

    def _of_group(self, index: int, scheduled: float, step: int) -> float:
        found, given = float(self.settings.optimizer.param_groups[index]["lr"]), self.settings.rate_set(index)
        due = scheduled if given is None else given
        if _equal(found, due):
            return due
        if not self.settings.by_user:
            raise _wrong(
                f"the optimizer has a learning rate of {found:g} in step {step + 1}; the schedule gives {due:g}"
            )
        self.settings.take_rate(index, due, found)
        return found


def _equal(found: float, due: float) -> bool:
    return abs(found - due) <= 1e-6 * abs(due) + 1e-15


def _wrong(found: str) -> ProofError:
    return ProofError(
        "learning_rate",
        found,
        "something other than the scheduler or a callback of yours set the learning rate, or the scheduler belongs to another "
        "run or step",
        "give the learning rate in the config (learning_rate, lr_scheduler_type, warmup_steps), or a scheduler of your own with "
        "the optimizer; resume with the checkpoint's scheduler.pt and the same settings",
    )
