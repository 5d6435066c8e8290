"""The learning rates of a step, from the schedule's formula where it is written in `definitions/schedules.py`.

`parity/step/update.py` compares the optimizer's rates with them and computes the update with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.definitions.schedules import rate_factor
from lockstep.errors import ProofError


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of a run.

    Attributes:
        scheduler: the run's scheduler.
        schedule: its name; None: the user made the scheduler, or gave it options, so that no formula is known.
        warmup, total: as in `rate_factor`.
        start: number of steps before training began; above 0 for a resumed run.
        base: the learning rate that the config gives each trained parameter, by name; None: the user made the optimizer.
    """

    scheduler: Any
    schedule: str | None
    warmup: int
    total: int
    start: int
    base: Callable[[str], float] | None

    def check_start(
        self, step: int, groups: Sequence[Mapping[str, Any]], group_of: Sequence[int], names: Sequence[str]
    ) -> None:
        """Compare the optimizer's first learning rates with the config. A resumed run has the rates of its checkpoint.

        Raises:
            ProofError: they differ.
        """
        if step > 0 or self.base is None:
            return
        for name, index in zip(names, group_of, strict=True):
            found, due = _first(groups[index]), self.base(name)
            if not _equal(found, due):
                raise _wrong(
                    f"the optimizer begins with a learning rate of {found:g} for {name}; the config gives {due:g}"
                )

    def at(self, step: int, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """The learning rate of each group in a step.

        Args:
            step: number of steps before this one.
            groups: the optimizer's groups when training began.

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
            rates = [_first(group) * factor for group in groups]
        for group, due in zip(optimizer.param_groups, rates, strict=True):
            if not _equal(float(group["lr"]), due):
                raise _wrong(
                    f"the optimizer has a learning rate of {float(group['lr']):g} in step {step + 1}; the schedule gives {due:g}"
                )
        return rates


def _first(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _equal(found: float, due: float) -> bool:
    return abs(found - due) <= 1e-6 * abs(due) + 1e-15


def _wrong(found: str) -> ProofError:
    return ProofError(
        "learning_rate",
        found,
        "something set the optimizer's learning rate beside the scheduler, or the scheduler belongs to another run or step",
        "give the learning rate in the config (learning_rate, lr_scheduler_type, warmup_steps), or a scheduler of your own with "
        "the optimizer; resume with the checkpoint's scheduler.pt and the same settings",
    )
