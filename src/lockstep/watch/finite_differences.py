"""Proof of the model's own backward: the gradient that it gives is the slope of a plain forward along drawn directions.

The trainer's own forward and backward compute the gradient of a drawn sum of scores, and what a drawn part of a real
step adds to the gradients. The same sum is computed here by `plain_scores` in float64 or float32, with the weights
moved a little forth and back along a direction. Nothing of autograd takes part in that.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.devices import on_host, rounds_products, sent
from lockstep.errors import ProofError
from lockstep.watch.plain_forward import Move, Widened, plain_scores

# The gradient of a policy that is certain of every token is too small for float32.
_VANISHES = 1e-20
# Directions of one check.
_DIRECTIONS = 2
# By how much a move changes the sum of scores, whose size is about 1.
_CHANGE = 1e-4
# The same where the plain forward computes in float32.
_CHANGE_SINGLE = 1e-2
# The part of a limit up to which a comparison in float32 decides.
_CLEAR = 0.5
# Ids of a sequence whose attention in float64 fits on a GPU.
_LONGEST = 4096
# A slope that depends on the step is measured with smaller ones. A float64 sum has digits for all of them.
_SMALLER, _SMALLER_TIMES = 8.0, 7
# A gradient of 0 is wrong if the sum of scores changes by more than this along a relative change of the weights.
_VISIBLE = 1e-6
# A tensor whose gradient is smaller than this part of the largest one is moved as if it had that size.
_FLOOR = 1e-2

_CAUSE = (
    "the backward of the model, of its attention or of the log-probs is wrong: something is detached, "
    "masked or scaled there"
)
_FIX = (
    "remove hooks, patches and custom kernels from the model (use_liger_kernel: false); otherwise this is a "
    "defect of Lockstep: report it"
)


@dataclass(frozen=True, slots=True)
class DrawnSum:
    """A drawn sum of scores: Σ coefficients × scores, over the N sampled tokens of some completions.

    Attributes:
        coefficients: (3, N) float64 factors of log-probs, entropies and values.
        distribution: the one that the completions were sampled from.
    """

    model: PreTrainedModel
    critic: torch.nn.Module | None
    completions: Sequence[Completion]
    coefficients: torch.Tensor
    distribution: Distribution

    @property
    def wide(self) -> torch.dtype:
        """The dtype of a comparison that decides. On a GPU attention in float64 holds all scores of a sequence."""
        longest = max(len(c.prompt_ids) + len(c.token_ids) for c in self.completions)
        return torch.float32 if self.model.device.type != "cpu" and longest > _LONGEST else torch.float64

    def total(self, moves: Mapping[int, Move], dtype: torch.dtype | None = None) -> torch.Tensor:
        """() float64, the sum, computed in a dtype (None: `wide`) with moved weights, on the model's device."""
        dtype = dtype or self.wide
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), Widened(moves, dtype):
                scores = plain_scores(self.model, self.critic, self.completions, self.distribution)
        finally:
            self.model.train(was_training)
        return (scores.double() * sent(self.coefficients, scores.device)).sum()

    def slopes(
        self, directions: Sequence[Mapping[int, Move]], step: float, dtype: torch.dtype | None = None
    ) -> list[float]:
        """The central difference along each direction. All sums are read from the device at once."""

        def moved(moves: Mapping[int, Move], sign: float) -> torch.Tensor:
            own = {i: Move(sign * step * m.size, m.rows, m.columns) for i, m in moves.items()}
            return self.total(own, dtype)

        sums = on_host([moved(moves, sign) for moves in directions for sign in (1.0, -1.0)])
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [(float(up) - float(down)) / (2 * step) for up, down in pairs]


def _signs(tensor: torch.Tensor, size: float, seed: tuple[int, ...]) -> Move:
    """Random signs in the shape of a tensor."""
    flat = tensor.ndim < 2
    rows = tensor.numel() if flat else tensor.shape[0]
    draws = np.random.default_rng(seed)

    def signs(count: int) -> torch.Tensor:
        return sent(torch.from_numpy(draws.integers(0, 2, count) * 2.0 - 1.0), tensor.device)

    return Move(size, signs(rows), None if flat else signs(tensor.numel() // max(rows, 1)))


def _sizes(named: Mapping[str, torch.nn.Parameter], norms: Mapping[str, float]) -> dict[str, float]:
    """How far each tensor is moved, so that all count alike; without any gradient: by a part of its own size."""
    least = _FLOOR * max(norms.values(), default=0.0)
    if not least or not math.isfinite(least):
        own = _norms(named)
        return {n: own[n] / math.sqrt(max(p.numel(), 1)) for n, p in named.items()}
    return {n: 1 / max(norm, least) for n, norm in norms.items()}


class Directions:
    """Drawn directions: in each tensor an outer product of signs, as large as makes every tensor count alike.

    The gradients of the trained tensors are those of the drawn sum.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], seed: tuple[int, ...]) -> None:
        self.named, self._seed = dict(named), seed
        self._places = {name: place for place, name in enumerate(named)}
        self.norms = _norms(_gradients(self.named))
        self.sizes = _sizes(self.named, self.norms)
        # The gradient along each direction, by tensor.
        self.along = self._along_now()

    @property
    def is_finite(self) -> bool:
        """Whether all gradients were finite."""
        return all(map(math.isfinite, self.norms.values()))

    def _along_now(self) -> list[dict[str, float]]:
        """The gradients that the tensors hold now, along each direction."""
        return [_read(_along(self.named, partial(self._move, number))) for number in range(_DIRECTIONS)]

    def distance(self) -> float:
        """How far the gradients are now from the first ones, along the directions, in sizes of those."""
        both = zip(self._along_now(), self.along, strict=True)
        pairs = [(now[name], before) for now, along in both for name, before in along.items()]
        apart = math.sqrt(sum((now - before) ** 2 for now, before in pairs))
        size = math.sqrt(sum(before**2 for _, before in pairs))
        return _in_sizes(apart, size)

    def _move(self, number: int, name: str) -> Move:
        return _signs(self.named[name], self.sizes[name], (*self._seed, number, self._places[name]))

    def moves(self, number: int, names: Sequence[str]) -> dict[int, Move]:
        """A direction, restricted to some tensors."""
        return {id(self.named[n]): self._move(number, n) for n in names if self.named[n].numel()}

    def scale(self, names: Sequence[str]) -> float:
        """The mean size of the gradient along a direction."""
        return math.sqrt(sum((self.sizes[n] * self.norms[n]) ** 2 for n in names))

    def compare(
        self, drawn_sum: DrawnSum, names: Sequence[str], step: float, dtype: torch.dtype | None = None
    ) -> Comparison:
        """The gradient along each direction, restricted to some tensors, and the slope."""
        found = [sum(along[n] for n in names) for along in self.along]
        due = drawn_sum.slopes([self.moves(k, names) for k in range(_DIRECTIONS)], step, dtype)
        return Comparison(np.array(found), np.array(due), self.scale(names))


class Added:
    """What a part of a step adds to the gradients, along one drawn direction up the gradient of every tensor.

    Random signs make an outer product in each tensor, as in `Directions`. The sign of the whole product is the one
    along which the part's gradient goes up. So the slope is a sum of positive parts: a gradient that is reversed,
    scaled or lost is in it for certain, and rounding, which has random signs, is small beside it.

    It is made before the backward of the part. The tensors may hold gradients of other parts.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], seed: tuple[int, ...]) -> None:
        self.named, self._seed = dict(named), seed
        self._places = {name: place for place, name in enumerate(named)}
        # Nothing is read from the device before the backward of the part.
        self._before = _along(self.named, self._unit)
        self._along: dict[str, float] = {}
        self.sizes: dict[str, float] = {}

    def _unit(self, name: str) -> Move:
        return _signs(self.named[name], 1.0, (*self._seed, self._places[name]))

    def read(self) -> None:
        """After the backward of the part."""
        before, after = _read(self._before), _read(_along(self.named, self._unit))
        self._along = {n: after[n] - before[n] for n in self.named}
        self.sizes = _sizes(self.named, _norms(_gradients(self.named)))

    def read_again(self) -> Added:
        """The gradients that the tensors hold now, along the same direction. None of them may have held one before."""
        found = copy.copy(self)
        found._along = _read(_along(self.named, self._unit))
        found.sizes = _sizes(self.named, _norms(_gradients(self.named)))
        return found

    def apart(self, other: Added) -> float:
        """How far both gradients are apart, over the parts along each tensor's direction, in sizes of the other one."""
        own, others = (
            np.array([size * found._along[n] for n, size in other.sizes.items()]) for found in (self, other)
        )
        return _in_sizes(float(np.linalg.norm(own - others)), float(np.linalg.norm(others)))

    def scaled(self, factor: float) -> Added:
        """A copy in which the gradient is multiplied by a factor."""
        found = copy.copy(self)
        found._along = {n: factor * along for n, along in self._along.items()}
        found.sizes = {n: size / factor for n, size in self.sizes.items()}
        return found

    def _moves(self, names: Sequence[str]) -> dict[int, Move]:
        found = {}
        for name in names:
            if self.named[name].numel():
                unit = self._unit(name)
                size = math.copysign(self.sizes[name], self._along[name])
                found[id(self.named[name])] = Move(size, unit.rows, unit.columns)
        return found

    def slope(self, names: Sequence[str]) -> float:
        """The slope along the direction, restricted to some tensors."""
        return sum(self.sizes[n] * abs(self._along[n]) for n in names)

    def compare(
        self, drawn_sum: DrawnSum, names: Sequence[str], step: float, dtype: torch.dtype | None = None
    ) -> Comparison:
        """The slope that the gradient gives, and that of the plain forward."""
        due = drawn_sum.slopes([self._moves(names)], step, dtype)
        return Comparison(np.array([self.slope(names)]), np.array(due), 0.0)

    def step(self, change: float) -> float:
        """How far to go along the direction, so that a sum of scores whose size is about 1 changes by `change`."""
        return change / max(self.slope(list(self.named)), 1.0)

    def distance(self, drawn_sum: DrawnSum) -> float:
        """How far the slope is from a plain forward's in float32, in sizes of the slope; infinite if not finite."""
        found = self.compare(drawn_sum, list(self.named), self.step(_CHANGE_SINGLE), torch.float32).error
        return found if math.isfinite(found) else math.inf


def check_added(added: Added, drawn_sum: DrawnSum, limit: float) -> float | None:
    """Compare what a part of a step adds to the gradients with the slope of a plain forward in float64.

    The coefficients of `drawn_sum` are the gradients that the loss gives to the part's scores.

    Returns:
        How far they are apart, in sizes of the slope; None if the plain forward is too coarse to tell.
    """
    step = added.step(_CHANGE)
    settled = _settled(added, drawn_sum, added.compare(drawn_sum, list(added.named), step), step, limit)
    if settled is None:
        return None
    first, step = settled
    if first.error <= limit:
        return first.error
    raise ProofError(
        "model_gradient",
        f"what {drawn_sum.completions[0].key} adds to the gradients of this step gives a slope of "
        f"{first.found[0]:.6g} along a drawn direction; a plain forward in float64 with moved weights gives "
        f"{first.due[0]:.6g} ({first.error:.2g} of its size, at most {limit:g}); seen from the output, the "
        f"first wrong part is {_first_wrong(added, drawn_sum, step, limit)}",
        _CAUSE,
        _FIX,
    )


def check_repeated(added: Added, again: Added, drawn_sum: DrawnSum, limit: float) -> float:
    """Compare what a part has added to the gradients with the same gradient, computed `again` outside of the step.

    Returns how far they are apart, in sizes of the gradient.
    """
    apart = added.apart(again)
    if not apart <= limit:
        raise ProofError(
            "model_gradient",
            f"what {drawn_sum.completions[0].key} adds to the gradients of this step is {apart:.2g} of its size "
            f"away from the same gradient, computed once more (at most {limit:g})",
            "something changes gradients during the steps alone: the accumulation, a scaler, or a hook that "
            "acts at times",
            _FIX,
        )
    return apart


class _Comparable(Protocol):
    named: dict[str, torch.nn.Parameter]

    def compare(self, drawn_sum: DrawnSum, names: Sequence[str], step: float) -> Comparison: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gradient and the slope along each direction, and the mean size of the gradient."""

    found: np.ndarray
    due: np.ndarray
    scale: float

    @property
    def apart(self) -> float:
        """The mean distance between gradient and slope, over all directions."""
        return float(np.sqrt(np.square(self.found - self.due).mean()))

    @property
    def error(self) -> float:
        """The distance, divided by the size of the gradient."""
        return self.apart / max(self.scale, float(np.abs(self.due).max()), 1e-300)


def check_model_gradient(
    drawn_sum: DrawnSum,
    named: Mapping[str, torch.nn.Parameter],
    seed: tuple[int, ...],
    limit: float,
    *,
    place: bool = True,
) -> float | None:
    """Compare the gradients of the drawn sum, which the tensors hold, with slopes.

    Args:
        place: whether an error names the first wrong part of the model.

    Returns:
        How far they are apart, in sizes of the gradient; None if the plain forward is too coarse to tell, or if the
        gradient vanishes in float32.
    """
    directions, names = Directions(named, seed), list(named)
    if not directions.is_finite:
        raise ProofError(
            "model_gradient", "the gradient of a drawn sum of log-probs is not finite", _CAUSE, _FIX
        )
    scale = directions.scale(names)
    vanishes = scale < _VANISHES
    if not vanishes and not rounds_products(torch.float32):
        single = directions.compare(drawn_sum, names, _CHANGE_SINGLE / max(scale, 1.0), torch.float32)
        if single.error <= _CLEAR * limit:
            return single.error
    change = _CHANGE if drawn_sum.wide == torch.float64 else _CHANGE_SINGLE
    step = change / max(scale, 1.0)
    first = directions.compare(drawn_sum, names, step)
    if vanishes and np.abs(first.due).max() < _VISIBLE:
        return None
    if (settled := _settled(directions, drawn_sum, first, step, limit)) is None:
        return None
    first, step = settled
    if first.error <= limit:
        return first.error
    at = int(np.abs(first.found - first.due).argmax())
    where = _first_wrong(directions, drawn_sum, step, limit) if place else "not searched"
    raise ProofError(
        "model_gradient",
        f"along a drawn direction the backward gives a slope of {first.found[at]:.6g}; a plain forward in "
        f"float64 with moved weights gives {first.due[at]:.6g} ({first.error:.2g} of the gradient's size, "
        f"at most {limit:g}); seen from the output, the first wrong part is {where}",
        _CAUSE,
        _FIX,
    )


def check_computed_gradient(distances: Sequence[float], limit: float) -> None:
    """Check that gradients in half precision are near those without autocast: one distance per drawn sum.

    In half precision, attention that is almost hard may round to another token. Then one drawn sum has another
    gradient, without a fault. A fault of the backward is there in most sums. So the median is judged.
    """
    median = float(np.median(distances))
    if not median <= limit:
        raise ProofError(
            "model_gradient",
            f"with autocast the gradient of a drawn sum of log-probs is {median:.2g} of its size away from "
            f"the gradient without autocast (the median of {len(distances)}; at most {limit:g})",
            "the backward in half precision loses gradients: a cached copy of weights, an overflow, or a kernel",
            "train with bf16: false, and report it with the model's name",
        )


def _settled(
    directions: _Comparable, drawn_sum: DrawnSum, first: Comparison, step: float, limit: float
) -> tuple[Comparison, float] | None:
    """The first comparison within the limit, or on whose step the slope does not depend, and that step. None: no such.

    Where a policy is nearly certain, its gradient is small beside the curvature: a step that changes the sum by a
    visible amount then changes the weights by much. If the slope depends on every step, a router has chosen other
    experts, or a kernel computes in few digits. A gradient that is not finite is wrong at any step.
    """
    names, before = list(directions.named), math.inf
    for _ in range(_SMALLER_TIMES):
        if first.error <= limit or not np.isfinite(first.found).all():
            return first, step
        again = directions.compare(drawn_sum, names, step / _SMALLER)
        apart = float(np.abs(again.due - first.due).max())
        if apart <= 0.25 * first.apart:
            return first, step
        # Curvature has less effect on a smaller step, and rounding has more.
        if not apart < before:
            return None
        first, step, before = again, step / _SMALLER, apart
    return (first, step) if first.error <= limit else None


def _first_wrong(directions: _Comparable, drawn_sum: DrawnSum, step: float, limit: float) -> str:
    """The part of the model that is nearest to the output and has a wrong gradient."""
    tensors: dict[str, list[str]] = {}
    for name in reversed(directions.named):
        layer = re.match(r".*?\.\d+\.", name)
        tensors.setdefault(layer.group() if layer else name, []).append(name)
    titles = list(tensors)
    low, high = 0, len(titles) - 1
    while low < high:
        middle = (low + high) // 2
        names = [name for title in titles[: middle + 1] for name in tensors[title]]
        if directions.compare(drawn_sum, names, step).error > limit:
            high = middle
        else:
            low = middle + 1
    return titles[low].rstrip(".")


def _gradients(named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in named.items()}


def _norms(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """The norm of each tensor; 0 without one. All are read from the device at once."""
    return _read({n: None if t is None else _norm(t) for n, t in tensors.items()})


def _read(values: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """Numbers of a device, by name, with one copy. None is 0."""
    held = [name for name, value in values.items() if value is not None]
    numbers = on_host([value for value in values.values() if value is not None])
    found = dict(zip(held, map(float, numbers), strict=True))
    return {name: found.get(name, 0.0) for name in values}


def _in_sizes(apart: float, size: float) -> float:
    """A distance in sizes of a gradient. One that vanishes in float32 is none, also beside a gradient that vanishes."""
    return max(apart - _VANISHES, 0.0) / max(size, 1e-300)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """() on the tensor's device."""
    dtype = None if tensor.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(tensor.detach(), dtype=dtype)


def _along(
    named: Mapping[str, torch.nn.Parameter], move_of: Callable[[str], Move]
) -> dict[str, torch.Tensor | None]:
    """() float64 on the device for each tensor: its gradient's inner product with a direction; None: no gradient."""
    held = _gradients(named)
    return {n: None if g is None or not g.numel() else _product(g, move_of(n)) for n, g in held.items()}


def _product(gradient: torch.Tensor, move: Move) -> torch.Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    own = gradient.detach().to(dtype)
    if move.columns is None:
        return move.size * (own.reshape(-1).double() @ move.rows)
    return move.size * ((own.reshape(len(move.rows), -1) @ move.columns.to(dtype)).double() @ move.rows)
