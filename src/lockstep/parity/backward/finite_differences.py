"""Proof of the model's own backward: the gradient that it gives is the slope of a plain forward along drawn directions.

`training/step/model_gradient.py` lets the trainer's own forward and backward compute the gradient of a drawn sum of scores. The
same sum is computed here by `plain_scores` in float64, with the weights moved a little forth and back along a direction. Nothing of
autograd takes part in that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion
from lockstep.errors import ProofError
from lockstep.parity.backward.in_float64 import Float64, Move
from lockstep.parity.backward.plain_scores import plain_scores
from lockstep.parity.logprobs.distributions import Distribution

# The gradient of a policy that is certain of every token is too small for float32.
_VANISHES = 1e-20
# Directions of one check.
_DIRECTIONS = 2
# By how much a move changes the sum of scores, whose size is about 1.
_CHANGE = 1e-4
# A tensor whose gradient is smaller than this part of the largest one is moved as if it had that size.
_FLOOR = 1e-2


@dataclass(frozen=True, slots=True)
class Drawn:
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

    def total(self, moves: Mapping[int, Move]) -> float:
        """The sum, computed with moved weights."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), Float64(moves):
                scores = plain_scores(self.model, self.critic, self.completions, self.distribution)
        finally:
            self.model.train(was_training)
        return float((scores.double() * self.coefficients).sum())

    def slope(self, moves: Mapping[int, Move], step: float) -> float:
        """The central difference along a direction."""

        def moved(sign: float) -> float:
            return self.total({i: Move(sign * step * m.size, m.rows, m.columns) for i, m in moves.items()})

        return (moved(1.0) - moved(-1.0)) / (2 * step)


class Directions:
    """Drawn directions: in each tensor an outer product of signs, as large as makes every tensor count alike.

    Args:
        named: the trained tensors. Their gradients are those of the drawn sum.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], seed: tuple[int, ...]) -> None:
        self.named, self._seed = dict(named), seed
        self._places = {name: place for place, name in enumerate(named)}
        self.norms = {n: 0.0 if p.grad is None else _norm(p.grad) for n, p in self.named.items()}
        least = _FLOOR * max(self.norms.values(), default=0.0)
        self.sizes = {n: 1 / max(norm, least) if least else 1.0 for n, norm in self.norms.items()}
        # The gradient along each direction, by tensor.
        self.along = [{n: self.along_now(k, n) for n in self.named} for k in range(_DIRECTIONS)]

    def along_now(self, number: int, name: str) -> float:
        """The gradient that a tensor holds now, along a direction."""
        gradient = self.named[name].grad
        return 0.0 if gradient is None or not gradient.numel() else _along(gradient, self._move(name, number))

    def distance(self) -> float:
        """How far the gradients that the tensors hold now are from the first ones, along the directions, in sizes of those."""
        pairs = [(self.along_now(k, name), a) for k, along in enumerate(self.along) for name, a in along.items()]
        apart = math.sqrt(sum((now - before) ** 2 for now, before in pairs))
        size = math.sqrt(sum(before**2 for _, before in pairs))
        # A distance that vanishes in float32 is none, also beside a gradient that vanishes.
        return max(apart - _VANISHES, 0.0) / max(size, 1e-300)

    def _move(self, name: str, number: int) -> Move:
        tensor = self.named[name]
        seed = (*self._seed, number, self._places[name])
        flat = tensor.ndim < 2
        rows = tensor.numel() if flat else tensor.shape[0]
        draws = np.random.default_rng(seed)

        def signs(count: int) -> torch.Tensor:
            return torch.from_numpy(draws.integers(0, 2, count) * 2.0 - 1.0).to(tensor.device)

        return Move(self.sizes[name], signs(rows), None if flat else signs(tensor.numel() // max(rows, 1)))

    def moves(self, number: int, names: Sequence[str]) -> dict[int, Move]:
        """A direction, restricted to some tensors."""
        return {id(self.named[n]): self._move(n, number) for n in names if self.named[n].numel()}

    def scale(self, names: Sequence[str]) -> float:
        """The mean size of the gradient along a direction."""
        return math.sqrt(sum((self.sizes[n] * self.norms[n]) ** 2 for n in names))

    def compare(self, drawn: Drawn, names: Sequence[str], step: float) -> Comparison:
        """The gradient along each direction, restricted to some tensors, and the slope."""
        found = [sum(along[n] for n in names) for along in self.along]
        due = [drawn.slope(self.moves(k, names), step) for k in range(_DIRECTIONS)]
        return Comparison(np.array(found), np.array(due), self.scale(names))


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
    drawn: Drawn, named: Mapping[str, torch.nn.Parameter], seed: tuple[int, ...], limit: float
) -> float | None:
    """Compare the gradients that the tensors hold with slopes.

    Args:
        named: the trained tensors; their gradients are those of the drawn sum.
        limit: how far both may be apart, in sizes of the gradient.

    Returns:
        How far they are apart; None if the plain forward is too coarse to tell, or if the gradient vanishes in float32.

    Raises:
        ProofError: they are further apart than the limit.
    """
    directions, names = Directions(named, seed), list(named)
    if directions.scale(names) < _VANISHES:
        return None
    step = _CHANGE / max(directions.scale(names), 1.0)
    first = directions.compare(drawn, names, step)
    if first.error <= limit:
        return first.error
    # A slope that depends on the step size says nothing: a router has chosen other experts, or a kernel computes in few digits.
    again = directions.compare(drawn, names, step / 4)
    if not np.abs(again.due - first.due).max() <= 0.25 * first.apart:
        return None
    at = int(np.abs(first.found - first.due).argmax())
    where = _first_wrong(directions, drawn, step, limit)
    raise ProofError(
        "model_gradient",
        f"along a drawn direction the backward gives a slope of {first.found[at]:.6g}; a plain forward in float64 with moved "
        f"weights gives {first.due[at]:.6g} ({first.error:.2g} of the gradient's size, at most {limit:g}); seen from the output, "
        f"the first wrong part is {where}",
        "the backward of the model, of its attention or of the log-probs is wrong: something is detached, masked or scaled there",
        "remove hooks, patches and custom kernels from the model (use_liger_kernel: false); otherwise this is a defect of "
        "Lockstep: report it",
    )


def check_computed_gradient(distances: Sequence[float], limit: float) -> None:
    """Check that gradients in half precision are near those without autocast.

    In half precision, attention that is almost hard may round to another token. Then one drawn sum has another gradient, without a
    fault. A fault of the backward is there in most sums. So the median over several drawn sums is judged.

    Args:
        distances: one per drawn sum, in sizes of the gradient (`Directions.distance`).

    Raises:
        ProofError: their median is over the limit.
    """
    median = float(np.median(distances))
    if not median <= limit:
        raise ProofError(
            "model_gradient",
            f"with autocast the gradient of a drawn sum of log-probs is {median:.2g} of its size away from the gradient without "
            f"autocast (the median of {len(distances)}; at most {limit:g})",
            "the backward in half precision loses gradients: a cached copy of weights, an overflow, or a kernel",
            "train with bf16: false, and report it with the model's name",
        )


def _first_wrong(directions: Directions, drawn: Drawn, step: float, limit: float) -> str:
    """The part of the model that is nearest to the output and has a wrong gradient."""
    parts: dict[str, list[str]] = {}
    for name in reversed(directions.named):
        layer = re.match(r".*?\.\d+\.", name)
        parts.setdefault(layer.group() if layer else name, []).append(name)
    titles = list(parts)
    low, high = 0, len(titles) - 1
    while low < high:
        middle = (low + high) // 2
        names = [name for title in titles[: middle + 1] for name in parts[title]]
        if directions.compare(drawn, names, step).error > limit:
            high = middle
        else:
            low = middle + 1
    return titles[low].rstrip(".")


def _norm(gradient: torch.Tensor) -> float:
    return float(
        torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32 if gradient.dtype != torch.float64 else None)
    )


def _along(gradient: torch.Tensor, move: Move) -> float:
    """The inner product of a gradient with a direction."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    own = gradient.detach().to(dtype)
    if move.columns is None:
        return move.size * float(own.reshape(-1).double() @ move.rows)
    return move.size * float((own.reshape(len(move.rows), -1) @ move.columns.to(dtype)).double() @ move.rows)
