"""The learning rates of a step, from the schedule's formula where it is written in `definitions/schedules.py`.

`parity/step/update.py` compares the optimizer's rates with them and computes the update with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.definitions.schedules import rate_factor
from lockstep.errors import ProofError
from lockstep.parity.step.optimizer_settings import OptimizerSettings


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of a run.

    Attributes:
        scheduler: the run's scheduler.
        schedule: its name; None: the user made the scheduler, or gave it options, so that no formula is known.
        warmup, total: as in `rate_factor`.
        start: number of steps before training began; above 0 for a resumed run.
        settings: the optimizer's settings. They have the rates before the schedule, and those that a user has set.
    """

    scheduler: Any
    schedule: str | None
    warmup: int
    total: int
    start: int
    settings: OptimizerSettings

    def at(self, step: int) -> list[float]:
        """The learning rate of each group in a step.

        Args:
            step: number of steps before this one.

        Raises:
            ProofError: the optimizer has other rates.
        """
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
