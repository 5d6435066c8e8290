"""Proof of the optimizer step: what every trained tensor becomes is what rule, rate, clipping and gradient make of it.

Every rank calls, around each optimizer step: `begin_step`, `gradients`, `clipped`, `before`, `after`. The elements of a
step are drawn at the end of the step before it, so that a change between two steps is seen as well.

Proof `clipping`.
Shows: drawn gradients, and large ones, are the ones before the clip times the right factor; the norm over all trained
tensors, summed a second time, is the norm of the clip.
Does not show: other elements; for up to three steps, a wrong norm by which all gradients were clipped.
When: every step; the norm at the first step and at one step in four (with sharded parameters at every step).

Proof `update`.
Shows: up to 32 drawn elements of *every* trained tensor, and their state, are what the optimizer's formula in float64
makes of the values and the state after the last step, the clipped gradient, the rate and the decay; every trained
tensor is in the optimizer, and has a gradient within 10 steps. Formulas are of AdamW, Adam, SGD, RMSprop and Adagrad of
torch, of Lion and AdamW of bitsandbytes in 32 bits, and of Adafactor.
Does not show: other elements, such as 200 of a matrix whose gradients are not the largest. With an optimizer without a
formula: only that tensors with a gradient move within 10 steps; the receipt and the report name it. In bf16 weights, a
change below rounding: the run then names the tensors that stand still.
When: every step; drawn again each time. The largest gradient of each 1/8,192 of the model (at least 16,384 elements)
has its turn within 32 steps. With Adafactor the tensors follow each other, each within 10 steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from lockstep.devices import on_host
from lockstep.errors import ProofError
from lockstep.shards.model import first_element, is_sharded, local_part
from lockstep.watch.elements import (
    AccumulationProof,
    DrawnElements,
    LargestElements,
    check_still,
    read_all,
)
from lockstep.watch.factored_steps import FactoredSteps, has_factored_steps
from lockstep.watch.optimizer_rules import Expected, OptimizerRule, Rates, State
from lockstep.watch.optimizer_settings import OptimizerSettings

_logger = logging.getLogger(__name__)

Share = Callable[[Callable[[], Any]], list[Any]]
# Steps that may pass before every trained tensor has had a gradient and has moved.
PATIENCE = 10
# The norm of the gradients is computed again at one step in so many: this reads every gradient once more.
_NORM_EVERY = 4
# Elements whose squares are summed in one call: in float32 the sum of many more loses digits.
_CHUNK = 1 << 22
# Elements that are searched at once for one that is not 0.
SEARCHED = 1 << 20
# Parts of an optimizer's state, in words.
_PARTS = {
    "first": "mean gradient",
    "mean": "mean gradient",
    "second": "mean square",
    "square": "mean square",
    "highest": "largest mean square",
    "sum": "sum of squares",
    "velocity": "momentum",
    "moving": "number of momenta",
    "steps": "number of steps",
}
_REPORT = "otherwise this is a defect of Lockstep: report it"


class UpdateProof:
    """The proof of a run's optimizer steps. Raises `ProofError` if one half of an adapter is not trained.

    Args:
        trained: the parameters that require a gradient, by name. This set must not change during the run.
        frozen: the other parameters, by name.
        rates: gives the learning rates of a step.
        max_norm: the norm that gradients are clipped to; 0: they are not clipped.
        seed: draws the elements.
        always: names of trained tensors whose gradients are compared at every step.
        may_rest: names of trained tensors that may have no gradient for many steps.
        gathered: as in `AccumulationProof`, for sharded parameters.
    """

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        frozen: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        rates: Rates,
        max_norm: float,
        seed: int,
        step: int,
        always: Collection[str] = (),
        may_rest: Collection[str] = (),
        gathered: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter,
    ) -> None:
        self._names, self._trained = list(trained), list(trained.values())
        _check_halves(trained, frozen)
        self._rule, self._rates = OptimizerRule(settings, self._trained, self._names), rates
        self._factored = (
            FactoredSteps(settings.optimizer, self._names, self._trained, self._rule.group_of, seed)
            if has_factored_steps(settings.optimizer)
            else None
        )
        self._max_norm, self._seed = max_norm, seed
        self._always, self._may_rest, self._gathered = always, set(may_rest), gathered
        self._sharded = [is_sharded(p) for p in self._trained]
        self._frozen = dict(frozen)
        # Per tensor: steps in a row without a gradient, and steps with a gradient in which no drawn element moved.
        self._without, self._stuck = [0] * len(self._names), [0] * len(self._names)
        self._named: set[str] = set()
        self._accumulation: AccumulationProof | None = None
        # The norm before the clip; None: this proof has not computed it, or the clip has not reported it.
        self._norm: float | None = None
        self._has_moved = self._said = False
        self._first = step
        self._largest = LargestElements(self._trained, (seed, 3))
        self._draw(step)

    def _draw(self, step: int) -> None:
        self._drawn = DrawnElements.of(self._trained, (self._seed, step, 1))
        self._kept = self._rule.read(self._drawn)
        if self._factored is not None:
            self._factored.keep(step)

    def say_unproven(self) -> str:
        """Why the changes of single elements cannot be proven, at the first call; empty: they are, or it was said."""
        if self._rule.known or self._factored is not None or self._said:
            return ""
        self._said = True
        why = (
            f"there is no formula for the steps of {self._rule.name}: only that every tensor moves is proven"
        )
        _logger.warning(f"proof update: {why}")
        return why

    # ---- before the optimizer ---------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Before the first backward after `step` steps: no gradient is left, and no parameter was frozen or freed."""
        parameters = dict(zip(self._names, self._trained, strict=True))
        changed = [n for n, p in parameters.items() if not p.requires_grad]
        if changed := changed + [n for n, p in self._frozen.items() if p.requires_grad]:
            raise ProofError(
                "update",
                f"requires_grad of {changed[0]} has changed since training began ({len(changed)} tensors)",
                "a callback or the model froze or freed a parameter",
                "set requires_grad before the trainer is made, and leave it",
            )
        self._step, self._norm = step, None
        self.abandon()
        always = tuple(self._always)
        self._accumulation = AccumulationProof(parameters, self._seed, step, always, self._gathered)

    def abandon(self) -> None:
        """Remove the hooks of a step that was not finished."""
        if self._accumulation is not None:
            self._accumulation.end()

    @torch.no_grad()
    def gradients(self, share: Share, *, learning: bool) -> None:
        """After gradients were summed over all ranks, before they are clipped. Every rank calls.

        The gradients must be what the backward passes added, and each tensor must get one in time. `share` gives every
        rank's value, in the order of ranks; `learning` is whether the loss of the step has a gradient.
        """
        assert self._accumulation is not None
        self._accumulation.check(share(self._accumulation.added))
        gradients = [p.grad for p in self._trained]
        pieces, largest = self._largest.of(gradients, self._step)
        self._unclipped, *largest = on_host([self._drawn.values(gradients), *largest])
        self._unclipped = self._unclipped.double()
        seen = self._of_tensors(self._unclipped != 0)
        # Ranks with parts of a tensor see other elements of it. They must add up the same tensors.
        is_due = self._step == self._first or (self._step + self._seed) % _NORM_EVERY == 0
        whole = is_due or any(self._sharded)
        read = [local_part(g) if whole or not seen[i] else None for i, g in enumerate(gradients)]
        squares = self._over_ranks([_squares(read)], share)[0]
        self._norm = math.sqrt(sum(squares)) if whole else None
        silent = [not seen[i] and not square for i, square in enumerate(squares)]
        self._check_gradients(silent, learning=learning)
        # The largest elements are read beside the drawn ones, and where a tensor has a gradient in few, one of these.
        few = {i: g for i, g in enumerate(gradients) if g is not None and squares[i] > 0 and not seen[i]}
        found = map(int, on_host([some_nonzero(local_part(gradient)) for gradient in few.values()]))
        places = [(i, first_element(g) + place) for (i, g), place in zip(few.items(), found, strict=True)]
        within = torch.cat(largest).tolist() if largest else []
        places += [(i, first + place) for (i, first), place in zip(pieces, within, strict=True)]
        self._sparse = DrawnElements.around(places, self._trained)
        self._sparse_kept = self._rule.read(self._sparse)
        self._sparse_unclipped = self._sparse.read(gradients)

    def clipped(self, norm: float) -> None:
        """After gradients were clipped: the norm that the clip computed is that of the gradients before."""
        if self._norm is None:
            self._norm = norm
        coarse = any(p.dtype != torch.float32 for p in self._trained)
        if not abs(norm - self._norm) <= (2e-2 if coarse else 1e-3) * self._norm + 1e-12:
            raise ProofError(
                "clipping",
                f"the gradients were clipped by a norm of {norm:.6g}; the norm over all trained tensors is "
                f"{self._norm:.6g}",
                "the clip did not see all gradients, or they changed after the last backward",
                "remove a callback or an override that changes gradients or clips them",
            )

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Just before the optimizer step: the gradients are the clipped ones, and the learning rates the schedule's."""
        self._step_rates = self._rates.at(step)
        gradients = [p.grad for p in self._trained]
        values = [drawn.values(gradients) for drawn in (self._drawn, self._sparse)]
        self._seen, self._sparse_seen = read_all(values)
        scale = 1.0
        if self._max_norm > 0:
            if self._norm is None:
                raise ProofError(
                    "clipping",
                    f"max_grad_norm is {self._max_norm:g}, and the gradients were not clipped before the "
                    f"optimizer step",
                    "the trainer's clip was replaced or left out",
                    "remove an override of the trainer that leaves out the clip, or set max_grad_norm=0",
                )
            scale = min(1.0, self._max_norm / (self._norm + 1e-6))
        self._check_clipped(self._drawn, self._unclipped, self._seen, scale)
        self._check_clipped(self._sparse, self._sparse_unclipped, self._sparse_seen, scale)

    def _check_clipped(
        self, drawn: DrawnElements, before: torch.Tensor, seen: torch.Tensor, scale: float
    ) -> None:
        eps, due = drawn.epsilons(self._trained), before * scale
        # The clip's own norm may differ from this proof's by rounding.
        wrong = ~((seen - due).abs() <= (2e-3 + 4 * eps) * due.abs() + 1e-30)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ProofError(
                "clipping",
                f"the gradient of {self._name(drawn, at)} is {float(seen[at]):.6g} at the optimizer; "
                f"{float(before[at]):.6g} × {scale:.4g} = {float(due[at]):.6g} is right for a norm of "
                f"{self._norm or 0.0:.4g} and max_grad_norm={self._max_norm:g}",
                "the gradients were not clipped, were clipped to another norm, or were changed afterwards",
                "remove a callback or an override that changes gradients or clips them",
            )
        if self._factored is not None:
            self._factored.before()

    # ---- after the optimizer ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def after(self, step: int, share: Share = lambda part: [part()]) -> dict[str, float]:
        """Just after the optimizer step, before gradients are cleared and the schedule advances: figures to log.

        Drawn elements must be what the step makes of them, and each tensor must move in time. `share` gives every
        rank's value, in the order of ranks. With sharded parameters, every rank calls.
        """
        self._step_rates = self._rates.in_step(self._step_rates)
        found = self._rule.read(self._drawn)
        if any(self._sharded):
            # An error of one rank is an error of all.
            share(lambda: self._check(found))
        else:
            self._check(found)
        self._has_moved = self._has_moved or any(self._step_rates)
        figures = self._figures(found, share)
        self._draw(step + 1)
        return figures

    @torch.no_grad()
    def check_still(self) -> None:
        """Before a checkpoint is written: weights and the optimizer's state are as the last step left them."""
        now = self._rule.read(self._drawn).elements()
        check_still(self._drawn, self._names, self._kept.elements(), now, "the last optimizer step")

    def _check(self, found: State) -> None:
        self._compare(self._drawn, self._kept, self._seen, found)
        if len(self._sparse):
            self._compare(self._sparse, self._sparse_kept, self._sparse_seen, self._rule.read(self._sparse))
        if self._factored is not None:
            self._factored.check(self._step_rates)
        self._check_moved(found)

    def _over_ranks(self, values: list[list[float]], share: Share) -> list[list[float]]:
        """Lists of one value per trained tensor. Of sharded tensors, the values of all ranks are added."""
        if not any(self._sharded):
            return values
        parts = share(lambda: values)
        return [
            [
                sum(part[k][i] for part in parts) if cut else value
                for i, (value, cut) in enumerate(zip(own, self._sharded, strict=True))
            ]
            for k, own in enumerate(values)
        ]

    def _compare(self, drawn: DrawnElements, kept: State, gradients: torch.Tensor, found: State) -> None:
        expected = self._rule.expected(kept, gradients, drawn, self._step_rates)
        if expected is None:
            return
        wrong = ~((found.values - expected.step.values).abs() <= expected.slack)
        if bool(wrong.any()):
            raise self._wrong_values(drawn, kept, found, expected, wrong)
        for part, differs in self._rule.state_differs(expected.step, found, drawn).items():
            if not bool(differs.any()):
                continue
            assert found.state is not None
            at = int(differs.nonzero()[0])
            steps = (
                f"after step {expected.step.state['steps'][at]:g} " if "steps" in expected.step.state else ""
            )
            raise ProofError(
                "update",
                f"{steps}the optimizer keeps {found.state[part][at]:.6g} as the {_PARTS[part]} of an element of "
                f"{self._name(drawn, at)}; {expected.step.state[part][at]:.6g} is right for {self._rule.name}",
                "the optimizer's state was lost, reset, or belongs to another step",
                "resume from a checkpoint with its optimizer.pt, and let nothing change optimizer.state; "
                + _REPORT,
            )

    def _wrong_values(
        self, drawn: DrawnElements, kept: State, found: State, expected: Expected, wrong: torch.Tensor
    ) -> ProofError:
        due, made = expected.step.values - kept.values, found.values - kept.values
        excess = ((made - due).abs() - expected.slack).nan_to_num(torch.inf)
        at = int(torch.where(wrong, excess, -1.0).argmax())
        names = sorted({self._names[i] for i in drawn.owners[wrong].tolist()})
        visible = due.abs() > 4 * expected.slack
        ratio = float((made[visible] / due[visible]).median()) if bool(visible.any()) else math.nan
        return ProofError(
            "update",
            f"an element of {self._name(drawn, at)} changed by {made[at]:.6g}, where {self._rule.name} changes it by "
            f"{due[at]:.6g} ({len(names)} of {len(self._names)} tensors differ; the median change is {ratio:.3g} "
            f"times the right one)",
            _cause(ratio),
            "remove what changes weights beside the optimizer step, or the wrapper around the optimizer; "
            + _REPORT,
        )

    def _check_gradients(self, none: Sequence[bool], *, learning: bool) -> None:
        """Count the steps in which a tensor had no gradient. lora_A has none while lora_B is 0."""
        if not learning or not self._has_moved:
            return
        self._without = [n + 1 if no else 0 for n, no in zip(self._without, none, strict=True)]
        silent = [n for n, count in zip(self._names, self._without, strict=True) if count >= PATIENCE]
        if silent := [name for name in silent if name not in self._may_rest]:
            raise ProofError(
                "update",
                f"{silent[0]} is trained and had no gradient in {PATIENCE} steps ({len(silent)} tensors)",
                "the parameter is not in the forward, its gradient is cut off, or the other half of its "
                "adapter stays 0",
                "call requires_grad_(False) on parameters that the model does not use; " + _REPORT,
            )

    def _check_moved(self, found: State) -> None:
        """Count the steps in which no drawn element of a tensor moved, though it had a gradient and a learning rate."""
        due, moved = self._of_tensors(self._seen != 0), self._of_tensors(found.values != self._kept.values)
        for i, name in enumerate(self._names):
            idle = due[i] and not moved[i] and self._step_rates[self._rule.group_of[i]] > 0
            self._stuck[i] = self._stuck[i] + 1 if idle else (0 if moved[i] else self._stuck[i])
            if self._stuck[i] < PATIENCE or name in self._named:
                continue
            dtype = str(self._trained[i].dtype).removeprefix("torch.")
            if dtype == "float32" and not self._rule.known:
                raise ProofError(
                    "update",
                    f"{name} has a gradient and did not move in {PATIENCE} steps",
                    "the optimizer leaves the tensor out, or its steps are smaller than float32 can hold",
                    "give the tensor to the optimizer, freeze it, or raise learning_rate",
                )
            self._named.add(name)
            _logger.warning(
                f"no drawn element of {name} moved in {PATIENCE} steps: {dtype} rounds its updates away"
            )

    def _figures(self, found: State, share: Share) -> dict[str, float]:
        """Sizes over all trained tensors, estimated from the drawn elements."""
        change = found.values - self._kept.values
        sizes = torch.tensor([float(p.numel()) for p in self._trained])
        counts = torch.bincount(self._drawn.owners, minlength=len(sizes)).clamp(min=1).double()

        def totals(values: torch.Tensor) -> list[float]:
            sums = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, self._drawn.owners, values)
            return (sums / counts * sizes).tolist()

        drawn = [totals(v) for v in (change.square(), self._kept.values.square(), (change != 0).double())]
        squares, weights, moved = (sum(own) for own in self._over_ranks(drawn, share))
        return {
            "update/norm": math.sqrt(squares),
            "update/relative": math.sqrt(squares / weights) if weights else 0.0,
            "update/moved_share": moved / float(sizes.sum()),
        }

    def _of_tensors(self, flags: torch.Tensor) -> list[bool]:
        """Whether a flag of a drawn element is set, per tensor."""
        counts = torch.zeros(len(self._names)).index_add(0, self._drawn.owners, flags.float())
        return (counts > 0).tolist()

    def _name(self, drawn: DrawnElements, element: int) -> str:
        return self._names[int(drawn.owners[element])]


def _check_halves(trained: Mapping[str, object], frozen: Mapping[str, object]) -> None:
    """Refuse an adapter of which one half is trained and the other is not."""
    for name in trained:
        for own, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
            if own in name and (half := name.replace(own, other)) in frozen:
                raise ProofError(
                    "update",
                    f"{name} is trained, and {half} is frozen",
                    "one half of the adapter was frozen; the adapter cannot learn as it should",
                    f"call requires_grad_(True) on {other}, or leave the layer out of target_modules",
                )


def some_nonzero(gradient: torch.Tensor) -> torch.Tensor:
    """() int64 on its device: the place of the largest element of the first part that has one that is not 0."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.int64, device=gradient.device)
    parts = gradient.reshape(-1).split(SEARCHED)
    if gradient.device.type == "cpu":
        number = next((i for i, part in enumerate(parts) if part.count_nonzero()), 0)
        return number * SEARCHED + parts[number].abs().argmax()
    # The host does not wait to learn which part is the first one: all are searched.
    first = torch.stack([part.count_nonzero() for part in parts]).gt(0).to(torch.uint8).argmax()
    return first * SEARCHED + torch.stack([part.abs().argmax() for part in parts]).take(first)


def _squares(gradients: Sequence[torch.Tensor | None]) -> list[float]:
    """The sum of squares of each tensor."""
    sums: list[torch.Tensor] = []
    owners: list[int] = []
    for index, gradient in enumerate(gradients):
        for part in gradient.reshape(-1).split(_CHUNK) if gradient is not None else ():
            exact = part.float()
            sums.append(torch.dot(exact, exact))
            owners.append(index)
    totals = [0.0] * len(gradients)
    for index, value in zip(owners, torch.stack(sums).tolist() if sums else (), strict=True):
        totals[index] += value
    return totals


def _cause(ratio: float) -> str:
    """The likely cause of a wrong step, from the ratio of the changes to the right ones."""
    for low, high, cause in (
        (-0.01, 0.01, "the optimizer did not step, or the tensor was put back afterwards"),
        (-1.5, -0.5, "the optimizer went up the gradient instead of down"),
        (1.7, 2.3, "the optimizer stepped twice"),
    ):
        if low <= ratio <= high:
            return cause
    return (
        "the optimizer used another learning rate, other moments or another gradient, or the weights were "
        "changed or rounded beside the step"
    )
