"""What an optimizer must make of drawn elements, by its rule and by the schedule's learning rate.

Settings and state are read, and the step is computed a second time, by `definitions/optimizer_steps.py`. Formulas of
some schedules stand in `definitions/optimizer.py`. Most schedules follow the steps; two of transformers follow the
metrics of evaluations (`reduce_lr_on_plateau`, `greedy`).

Proof `learning_rate`.
Shows: the rates of the optimizer are the config's, times the schedule's formula (constant, linear, cosine, with
warm-up); `reduce_lr_on_plateau`: its formula, from the metrics that it was given; for other schedules they are the
scheduler's, at the right step or after the right number of metrics.
Does not show: that a schedule without a formula here is right; the first step of a resumed run is compared with the
scheduler.
When: every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.definitions.optimizer import PlateauSchedule, rate_factor
from lockstep.definitions.optimizer_steps import Elements, Step, adagrad, adam, lion, rmsprop, sgd
from lockstep.errors import ProofError
from lockstep.watch.elements import DrawnElements, read_all
from lockstep.watch.optimizer_settings import OptimizerSettings


@dataclass(frozen=True, slots=True)
class _Formula:
    """A formula of `definitions/optimizer_steps.py`, and what an optimizer calls its parts.

    Attributes:
        name: of the optimizer, in words.
        step: the formula.
        state: the formula's name of each part of the state, and the optimizer's.
        settings: names of the settings in a group, beside the rate. A group may lack a switch; it is off then.
        constants: settings that the optimizer does not have.
        decays_apart: whether some device decays the new value, and another one the old one.
    """

    name: str
    step: Callable[[torch.Tensor, torch.Tensor, Elements, Elements], Step]
    state: Mapping[str, str]
    settings: tuple[str, ...]
    constants: Mapping[str, float] = field(default_factory=dict)
    decays_apart: bool = False


_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq", "highest": "max_exp_avg_sq", "steps": "step"}
_OF_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
_OF_TORCH: dict[type, _Formula] = {
    torch.optim.AdamW: _Formula("AdamW", adam, _MOMENTS, _OF_ADAM, {"decoupled_weight_decay": 1.0}),
    torch.optim.Adam: _Formula("Adam", adam, _MOMENTS, (*_OF_ADAM, "decoupled_weight_decay")),
    torch.optim.SGD: _Formula(
        "SGD",
        sgd,
        {"velocity": "momentum_buffer", "moving": ""},
        ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    ),
    torch.optim.RMSprop: _Formula(
        "RMSprop",
        rmsprop,
        {"square": "square_avg", "mean": "grad_avg", "velocity": "momentum_buffer", "steps": "step"},
        ("alpha", "eps", "momentum", "weight_decay", "centered", "maximize"),
    ),
    torch.optim.Adagrad: _Formula(
        "Adagrad",
        adagrad,
        {"sum": "sum", "steps": "step"},
        ("lr_decay", "eps", "weight_decay", "maximize"),
    ),
}
# With their state in 32 bits. Kernels for GPUs decay after the step, those for CPUs before.
_OF_BITSANDBYTES = {
    "Lion": _Formula("Lion", lion, {"first": "state1"}, ("betas", "weight_decay"), decays_apart=True),
    "AdamW": _Formula(
        "AdamW",
        adam,
        {"first": "state1", "second": "state2", "highest": "", "steps": "step"},
        ("betas", "eps", "weight_decay"),
        {"decoupled_weight_decay": 1.0, "amsgrad": 0.0, "maximize": 0.0},
        decays_apart=True,
    ),
}


def formula_of(optimizer: torch.optim.Optimizer) -> _Formula | None:
    """The formula of an optimizer's step; None: there is none here. A subclass may step in another way."""
    kind = type(optimizer)
    if kind in _OF_TORCH:
        return _OF_TORCH[kind]
    if kind.__module__ not in ("bitsandbytes.optim.lion", "bitsandbytes.optim.adamw"):
        return None
    wanted: Any = getattr(optimizer, "args", None)
    plain = getattr(wanted, "optim_bits", 0) == 32 and not getattr(wanted, "max_unorm", 0.0)
    return _OF_BITSANDBYTES.get(kind.__name__.removeprefix("Paged").removesuffix("32bit")) if plain else None


@dataclass(frozen=True, slots=True)
class State:
    """Drawn elements of the trained tensors: values, and the optimizer's state where its formula is known.

    Attributes:
        keys: the optimizer's name of each part of the state.
    """

    values: torch.Tensor
    state: Elements | None
    keys: Mapping[str, str] = field(default_factory=dict)

    def elements(self) -> dict[str, torch.Tensor]:
        """The same by the optimizer's names, for `watch/elements.py`."""
        return {"weight": self.values} | {self.keys.get(k) or k: v for k, v in (self.state or {}).items()}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step must have made of drawn elements, and (N,) the differences of the values that rounding explains."""

    step: Step
    slack: torch.Tensor


class OptimizerRule:
    """The rule of an optimizer. Raises `ProofError` if a trained parameter is in no group, or in two."""

    def __init__(
        self, settings: OptimizerSettings, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]
    ) -> None:
        optimizer = settings.optimizer
        self._settings, self._optimizer, self._parameters = settings, optimizer, parameters
        self._formula = formula_of(optimizer)
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
        """Whether the step of a single element is written here."""
        return self._formula is not None

    @property
    def name(self) -> str:
        """The optimizer's name, in words."""
        return type(self._optimizer).__name__ if self._formula is None else self._formula.name

    def read(self, drawn: DrawnElements) -> State:
        """The drawn elements as they are now."""
        if self._formula is None:
            return State(drawn.read(self._parameters), None)
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        keys = self._formula.state
        in_use = {key for state in states for key, value in state.items() if value is not None} - {"step"}
        of_elements = {name: key for name, key in keys.items() if key in in_use}
        steps = [s.get("step", 0.0) for s in states]
        # A fused optimizer keeps the number of a tensor's steps on the device.
        tensors = [s for s in steps if isinstance(s, torch.Tensor)] if len(drawn) else []
        parts = [drawn.values([s.get(key) for s in states]) for key in of_elements.values()]
        stack = [torch.stack(tensors)] if tensors else []
        values, *found = read_all([drawn.values(self._parameters), *parts, *stack])
        state = dict(zip(of_elements, found, strict=False))
        if "steps" in keys:
            counts = iter(found[-1].tolist() if tensors else ())
            state["steps"] = drawn.spread(
                [next(counts, 0.0) if isinstance(s, torch.Tensor) else float(s) for s in steps]
            )
        if "moving" in keys:
            state["moving"] = drawn.spread([s.get(keys["velocity"]) is not None for s in states])
        return State(values, {name: state.get(name, torch.zeros_like(values)) for name in keys}, keys)

    def expected(
        self, before: State, gradients: torch.Tensor, drawn: DrawnElements, rates: Sequence[float]
    ) -> Expected | None:
        """What the step must make of drawn elements; None where the formula is not known.

        `gradients` are (N,) as the optimizer sees them; `rates` has the learning rate of each group.
        """
        if before.state is None or self._formula is None:
            return None
        settings = self._values_of_settings(self._formula, drawn, rates)
        step = self._formula.step(before.values, gradients, before.state, settings)
        eps = drawn.epsilons(self._parameters)
        loose = (8 * eps).clamp(min=1e-4)
        if self._formula.decays_apart:
            loose = loose + settings["rate"] * settings["weight_decay"]
        rounding = 2 * eps * torch.maximum(step.values.abs(), before.values.abs())
        return Expected(step, loose * step.size + rounding)

    def _values_of_settings(
        self, formula: _Formula, drawn: DrawnElements, rates: Sequence[float]
    ) -> dict[str, torch.Tensor]:
        groups = self._settings.groups

        def spread(values: Sequence[float]) -> torch.Tensor:
            return drawn.spread([values[g] for g in self.group_of])

        found = {"rate": spread(rates)} | {k: spread([v] * len(groups)) for k, v in formula.constants.items()}
        for name in formula.settings:
            if name == "betas":
                found |= {f"beta{i + 1}": spread([g["betas"][i] for g in groups]) for i in range(2)}
            else:
                found[name] = spread([float(g.get(name) or 0.0) for g in groups])
        return found

    def state_differs(self, expected: Step, found: State, drawn: DrawnElements) -> dict[str, torch.Tensor]:
        """By name, (N,) bool, whether a part of the state after the step is not what the formula makes."""
        assert found.state is not None
        eps = drawn.epsilons(self._parameters)
        loose = (8 * eps).clamp(min=1e-5)
        # Squares below float32's smallest numbers become zero.
        return {
            name: ~((found.state[name] - due).abs() <= loose * expected.sizes[name] + 1e-30)
            for name, due in expected.state.items()
        }


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
