"""What an optimizer must make of drawn elements, by its rule and by the schedule's learning rate.

Settings and state are read, and the step is computed a second time. The rule of torch's AdamW, the only one here, and
the formulas of some schedules stand in `definitions/optimizer.py`. Most schedules follow the steps; two of transformers
follow the metrics of evaluations (`reduce_lr_on_plateau`, `greedy`).

Proof `learning_rate`.
Shows: the rates of the optimizer are the config's, times the schedule's formula (constant, linear, cosine, with
warm-up); `reduce_lr_on_plateau`: its formula, from the metrics that it was given; for other schedules they are the
scheduler's, at the right step or after the right number of metrics.
Does not show: that a schedule without a formula here is right; the first step of a resumed run is compared with the
scheduler.
When: every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.definitions.optimizer import Moments, PlateauSchedule, Settings, adamw, rate_factor
from lockstep.errors import ProofError
from lockstep.watch.elements import DrawnElements, read_all
from lockstep.watch.optimizer_settings import OptimizerSettings


@dataclass(frozen=True, slots=True)
class State:
    """Drawn elements of the trained tensors: values, and the moments where the rule of the optimizer is known."""

    values: torch.Tensor
    moments: Moments | None

    def elements(self) -> dict[str, torch.Tensor]:
        """The same by name, for `watch/elements.py`."""
        m = self.moments
        moments = {} if m is None else {"exp_avg": m.first, "exp_avg_sq": m.second, "step": m.steps}
        return {"weight": self.values, **moments}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step must have made of drawn elements: new state, and (N,) the differences that rounding explains."""

    state: State
    slack: torch.Tensor


class OptimizerRule:
    """The rule of an optimizer. Raises `ProofError` if a trained parameter is in no group, or in two."""

    def __init__(
        self, settings: OptimizerSettings, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]
    ) -> None:
        optimizer = settings.optimizer
        self._settings, self._optimizer, self._parameters = settings, optimizer, parameters
        places = [(id(p), i) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
        group_of = dict(places)
        lost = [name for name, p in zip(names, parameters, strict=True) if id(p) not in group_of]
        if lost or len(group_of) != len(places):
            raise ProofError(
                "update",
                f"{lost[0]} requires a gradient and is in no group of the optimizer ({len(lost)} of "
                f"{len(names)} tensors)"
                if lost
                else "a parameter is in the optimizer twice",
                "the optimizer was made from other parameters than those that are trained",
                "give every trained parameter to the optimizer once, and call requires_grad_(False) on those "
                "that stay as they are",
            )
        self.group_of = [group_of[id(p)] for p in parameters]

    @property
    def known(self) -> bool:
        """Whether the rule is written here, for the settings of the latest step."""
        others = ("amsgrad", "maximize")
        return type(self._optimizer) is torch.optim.AdamW and not any(
            group.get(name) for group in self._settings.groups for name in others
        )

    def read(self, drawn: DrawnElements) -> State:
        """The drawn elements as they are now."""
        if not self.known:
            return State(drawn.read(self._parameters), None)
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        moments = ([s.get(name) for s in states] for name in ("exp_avg", "exp_avg_sq"))
        steps = [s.get("step", 0.0) for s in states]
        # A fused optimizer keeps the number of a tensor's steps on the device.
        tensors = [s for s in steps if isinstance(s, torch.Tensor)] if len(drawn) else []
        parts = [drawn.values(own) for own in (self._parameters, *moments)]
        values, first, second, *stacked = read_all([*parts, *([torch.stack(tensors)] if tensors else [])])
        counts = iter(stacked[0].tolist() if stacked else ())
        counted = [next(counts, 0.0) if isinstance(s, torch.Tensor) else float(s) for s in steps]
        of_tensor = torch.tensor(counted, dtype=torch.float64)
        return State(values, Moments(first, second, of_tensor[drawn.owners]))

    def expected(
        self, before: State, gradients: torch.Tensor, drawn: DrawnElements, rates: Sequence[float]
    ) -> Expected | None:
        """What the step must make of drawn elements; None where the rule is not known.

        `gradients` are (N,) as the optimizer sees them; `rates` has the learning rate of each group.
        """
        if before.moments is None or not self.known:
            return None
        owners, groups = drawn.owners, self._settings.groups

        def spread(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor([values[g] for g in self.group_of], dtype=torch.float64)[owners]

        settings = Settings(
            rate=spread(rates),
            beta1=spread([g["betas"][0] for g in groups]),
            beta2=spread([g["betas"][1] for g in groups]),
            epsilon=spread([g["eps"] for g in groups]),
            decay=spread([g["weight_decay"] for g in groups]),
        )
        new, moments, size = adamw(before.values, gradients, before.moments, settings)
        eps = torch.tensor([torch.finfo(p.dtype).eps for p in self._parameters], dtype=torch.float64)[owners]
        loose = (8 * eps).clamp(min=1e-4)
        rounding = 2 * eps * torch.maximum(new.abs(), before.values.abs())
        return Expected(State(new, moments), loose * size + rounding)

    def moments_differ(
        self, expected: Moments, found: Moments, gradients: torch.Tensor, drawn: DrawnElements
    ) -> torch.Tensor:
        """(N,) bool, whether the moments after the step are not those that the rule makes."""
        by_tensor = [torch.finfo(p.dtype).eps for p in self._parameters]
        eps = torch.tensor(by_tensor, dtype=torch.float64)[drawn.owners]
        loose = (8 * eps).clamp(min=1e-5)
        # Squares below float32's smallest numbers become zero.
        sizes = expected.first.abs() + gradients.abs()
        first = (found.first - expected.first).abs() > loose * sizes + 1e-30
        sizes = expected.second + gradients.square()
        second = (found.second - expected.second).abs() > loose * sizes + 1e-30
        return first | second | (found.steps != expected.steps) | found.first.isnan() | found.second.isnan()


@dataclass(slots=True)
class Rates:
    """The learning rates of a run.

    Attributes:
        schedule: name of the schedule; None: the user made the scheduler, or gave it options, so no formula is known.
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
        """Check the learning rate of each group in the step after `step` steps, and return them."""
        if self.metrics is not None:
            return [self._of_group(index, due, step) for index, due in enumerate(self._by_metric(step))]
        # The first step of a resumed run has its checkpoint's rate, even if the run is longer now.
        resumed = 0 < step == self.start
        formula = None if resumed else self.schedule
        factor = None if formula is None else rate_factor(formula, step, self.warmup, self.total)
        if factor is None:
            rates = [float(rate) for rate in self.scheduler.get_last_lr()]
            taken = getattr(self.scheduler, "last_epoch", step)
            if taken != step:
                raise _wrong(
                    f"the schedule has taken {taken} steps before optimizer step {step + 1}, not {step}"
                )
        else:
            rates = [first * factor for first in self.settings.first_rates()]
        return [self._of_group(index, due, step) for index, due in enumerate(rates)]

    def _by_metric(self, step: int) -> list[float]:
        taken = getattr(self.scheduler, "last_epoch", self.metrics)
        if taken != self.metrics:
            raise _wrong(
                f"the schedule has taken {taken} metrics before optimizer step {step + 1}, not {self.metrics}"
            )
        return list(self.plateau.rates) if self.plateau else list(map(float, self.scheduler.get_last_lr()))

    def before_metric(self) -> None:
        """Note the learning rates from which a schedule goes on that follows metrics. A user may have set them."""
        if self.plateau is not None:
            found = map(self.settings.rate_set, range(len(self.plateau.rates)))
            pairs = zip(self.plateau.rates, found, strict=True)
            self.plateau.rates = [rate if given is None else given for rate, given in pairs]

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
        "something other than the scheduler or a callback of yours set the learning rate, or the scheduler belongs to "
        "another run or step",
        "give the learning rate in the config (learning_rate, lr_scheduler_type, warmup_steps), or a scheduler of "
        "your own with the optimizer; resume with the checkpoint's scheduler.pt and the same settings",
    )
