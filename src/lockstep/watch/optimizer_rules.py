"""What an optimizer must make of drawn elements: read its settings and state, and compute the step a second time.

For torch's AdamW the rule is written in `definitions/adamw.py`. Others have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.definitions.adamw import Moments, Settings, adamw
from lockstep.errors import ProofError
from lockstep.watch.optimizer_settings import OptimizerSettings
from lockstep.watch.windows import Drawn, read_all


@dataclass(frozen=True, slots=True)
class State:
    """Drawn elements of the trained tensors: values, and the moments where the rule of the optimizer is known."""

    values: torch.Tensor
    moments: Moments | None

    def elements(self) -> dict[str, torch.Tensor]:
        """The same by name, for `watch/still.py`."""
        m = self.moments
        moments = {} if m is None else {"exp_avg": m.first, "exp_avg_sq": m.second, "step": m.steps}
        return {"weight": self.values, **moments}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step must have made of drawn elements: new state, and (N,) the differences that rounding explains."""

    state: State
    slack: torch.Tensor


class OptimizerRule:
    """The rule of an optimizer over a list of parameters.

    Args:
        settings: the settings of the optimizer.
        parameters: the trained parameters.
        names: their names.

    Raises:
        ProofError: a trained parameter is in no group of the optimizer, or in two.
    """

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
                f"{lost[0]} requires a gradient and is in no group of the optimizer ({len(lost)} of {len(names)} tensors)"
                if lost
                else "a parameter is in the optimizer twice",
                "the optimizer was made from other parameters than those that are trained",
                "give every trained parameter to the optimizer once, and call requires_grad_(False) on those that stay as they are",
            )
        self.group_of = [group_of[id(p)] for p in parameters]

    @property
    def known(self) -> bool:
        """Whether the rule is written here, for the settings of the latest step."""
        others = ("amsgrad", "maximize")
        return type(self._optimizer) is torch.optim.AdamW and not any(
            group.get(name) for group in self._settings.groups for name in others
        )

    def read(self, drawn: Drawn) -> State:
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
        of_tensor = torch.tensor(
            [next(counts, 0.0) if isinstance(s, torch.Tensor) else float(s) for s in steps], dtype=torch.float64
        )
        return State(values, Moments(first, second, of_tensor[drawn.owners]))

    def expected(self, before: State, gradients: torch.Tensor, drawn: Drawn, rates: Sequence[float]) -> Expected | None:
        """What the step must make of drawn elements; None where the rule is not known.

        Args:
            gradients: (N,) as the optimizer sees them.
            rates: learning rate of each group.
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
        return Expected(State(new, moments), loose * size + 2 * eps * torch.maximum(new.abs(), before.values.abs()))

    def moments_differ(self, expected: Moments, found: Moments, gradients: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """(N,) bool, whether the moments after the step are not those that the rule makes."""
        eps = torch.tensor([torch.finfo(p.dtype).eps for p in self._parameters], dtype=torch.float64)[drawn.owners]
        loose = (8 * eps).clamp(min=1e-5)
        # Squares below float32's smallest numbers become zero.
        first = (found.first - expected.first).abs() > loose * (expected.first.abs() + gradients.abs()) + 1e-30
        second = (found.second - expected.second).abs() > loose * (expected.second + gradients.square()) + 1e-30
        return first | second | (found.steps != expected.steps) | found.first.isnan() | found.second.isnan()
