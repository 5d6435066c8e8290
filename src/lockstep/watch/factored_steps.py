"""A part of proof `update`: the steps of Adafactor, for tensors in turn, from their whole gradients.

The size of a change of Adafactor depends on the whole gradient of a tensor. So the update of some tensors is computed
a second time just before each step, and compared with drawn elements after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.optimization import Adafactor

from lockstep.definitions.optimizer_steps import Factors, adafactor_factors, adafactor_update, no_factors
from lockstep.devices import on_host
from lockstep.errors import ProofError
from lockstep.watch.elements import DrawnElements

# Every tensor is compared within so many steps.
_WITHIN = 10
# Names of the state, in the order of `Factors`, and what they are in words.
_STATE = {
    "exp_avg_sq_row": "mean square of a row",
    "exp_avg_sq_col": "mean square of a column",
    "exp_avg_sq": "mean square",
}
# Parts of a number by which float32 may differ.
_LOOSE = 1e-4


def has_factored_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step is Adafactor's by a rate from outside and without a first moment, as `optim` makes it."""
    return type(optimizer) is Adafactor and not any(
        group["scale_parameter"] or group["relative_step"] or group["beta1"] is not None
        for group in optimizer.param_groups
    )


@dataclass(frozen=True, slots=True)
class _Due:
    """What a step must make of one tensor: the change of drawn elements ÷ rate, and the new state by name."""

    update: torch.Tensor
    state: Mapping[str, torch.Tensor]


class FactoredSteps:
    """Compares the steps of Adafactor.

    Args:
        group_of: index of the group of each parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        group_of: Sequence[int],
        seed: int,
    ) -> None:
        self._optimizer, self._names, self._parameters = optimizer, names, parameters
        self._group_of, self._seed = group_of, seed

    def keep(self, step: int) -> None:
        """At the end of a step: note the values and the state of the tensors whose next step is compared."""
        self._turn = [i for i in range(len(self._names)) if (i + step + self._seed) % _WITHIN == 0]
        self._drawn = DrawnElements.of(self._own(), (self._seed, step, 5))
        self._before, self._counts = self._values(), [self._state(i).get("step", 0) for i in self._turn]
        self._kept = [
            {name: self._state(i)[name].double().clone() for name in _STATE if name in self._state(i)}
            for i in self._turn
        ]

    def before(self) -> None:
        """Just before the optimizer's step, when the gradients are clipped: compute what it must make of them."""
        self._due = []
        for at, (index, kept, count) in enumerate(zip(self._turn, self._kept, self._counts, strict=True)):
            group = self._optimizer.param_groups[self._group_of[index]]
            gradient = self._parameters[index].grad
            assert gradient is not None
            share = 1.0 - (count + 1) ** group["decay_rate"]
            earlier = Factors(*map(kept.get, _STATE)) if kept else no_factors(gradient)
            new = adafactor_factors(gradient, earlier, share, group["eps"][0])
            places = self._drawn.places_in(at, gradient.device)
            update = adafactor_update(places, gradient, new, group["clip_threshold"])
            vectors = zip(_STATE, (new.rows, new.columns, new.squares), strict=True)
            self._due.append(_Due(update, {name: v for name, v in vectors if v is not None}))

    def check(self, rates: Sequence[float]) -> None:
        """After the step: compare, with the learning rate of each group in this step."""
        if not self._turn:
            return
        update, *differs = on_host([torch.cat([due.update for due in self._due]), *self._state_differences()])
        owners, groups = self._drawn.owners, [self._group_of[i] for i in self._turn]
        rate = self._drawn.spread([rates[g] for g in groups])
        decay = self._drawn.spread([self._optimizer.param_groups[g]["weight_decay"] for g in groups])
        eps = self._drawn.epsilons(self._own())
        due, found = self._before - rate * (update + decay * self._before), self._values()
        size = rate * (update.abs() + decay * self._before.abs())
        slack = (8 * eps).clamp(min=_LOOSE) * size + 2 * eps * torch.maximum(due.abs(), self._before.abs())
        wrong = ~((found - due).abs() <= slack)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise _wrong(
                f"an element of {self._names[self._turn[int(owners[at])]]} changed by "
                f"{float(found[at] - self._before[at]):.6g}, where Adafactor changes it by "
                f"{float(due[at] - self._before[at]):.6g}",
                "the optimizer did not step as it should, or the weights were changed or rounded beside the step",
            )
        for (index, name), share in zip(self._compared(), differs, strict=True):
            if not float(share) <= _LOOSE:
                raise _wrong(
                    f"the optimizer's {_STATE[name]} of {self._names[index]} differs by {float(share):.2g} of what "
                    f"Adafactor makes of it",
                    "the optimizer's state was lost, reset, or belongs to another step",
                )

    def _compared(self) -> list[tuple[int, str]]:
        return [(i, name) for i, due in zip(self._turn, self._due, strict=True) for name in due.state]

    def _state_differences(self) -> list[torch.Tensor]:
        """The largest relative difference of each vector of the state, on its device."""
        by_index = dict(zip(self._turn, self._due, strict=True))
        found = []
        for index, name in self._compared():
            due, now = by_index[index].state[name], self._state(index).get(name)
            whole = due.new_full((), torch.inf)
            found.append(
                whole if now is None else ((now.double() - due).abs() / due).max().nan_to_num(torch.inf)
            )
        return found

    def _state(self, index: int) -> dict[str, Any]:
        return self._optimizer.state.get(self._parameters[index], {})

    def _values(self) -> torch.Tensor:
        return self._drawn.read(self._own())

    def _own(self) -> list[torch.nn.Parameter]:
        return [self._parameters[i] for i in self._turn]


def _wrong(found: str, cause: str) -> ProofError:
    return ProofError(
        "update",
        found,
        cause,
        "remove what changes weights or the optimizer's state beside its step, or a wrapper around the optimizer",
    )
