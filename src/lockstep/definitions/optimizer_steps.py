"""The step of each optimizer, written a second time, in float64.

Adam and AdamW (arXiv 1711.05101, algorithm 2), amsgrad (1904.09237), SGD with momentum, RMSprop and Adagrad in
torch's forms, Lion (2302.06675, algorithm 2), and Adafactor (1804.04235, algorithm 4, with a rate from outside). All
but Adafactor's work on single elements. Adafactor's step needs whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

# (N,) float64 values by name: the state of an optimizer for N elements, or its settings. A setting that is on is 1.
Elements = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What an optimizer makes of N elements.

    Attributes:
        values: (N,) float64 new values.
        state: the new state by name.
        size: (N,) a scale for rounding errors: the change if all terms had the same sign. In a lower precision, the
            rounding error of the change is proportional to it. Infinite where rounding alone decides the change.
        sizes: the same for the state, by name. A count has 0: it is exact.
    """

    values: torch.Tensor
    state: Elements
    size: torch.Tensor
    sizes: Elements


def adam(values: torch.Tensor, gradient: torch.Tensor, state: Elements, settings: Elements) -> Step:
    """Adam and AdamW.

    Args:
        values, gradient: (N,) float64 values of the elements before the step, and their gradients.
        state: `first` and `second`, running means of the gradient and of its square; `highest`, the largest `second`
            so far; `steps`, the number of steps taken.
        settings: `rate`, `beta1`, `beta2`, `eps`, `weight_decay`, `decoupled_weight_decay` (1: the decay is not part of
            the gradient), `amsgrad`, `maximize`.
    """
    s = settings
    steps = state["steps"] + 1
    decays = s["weight_decay"] * s["decoupled_weight_decay"]
    gradient = _downwards(gradient, s) + (s["weight_decay"] - decays) * values
    first = s["beta1"] * state["first"] + (1 - s["beta1"]) * gradient
    second = s["beta2"] * state["second"] + (1 - s["beta2"]) * gradient**2
    highest = torch.where(s["amsgrad"] > 0, torch.maximum(state["highest"], second), state["highest"])
    divided = torch.where(s["amsgrad"] > 0, highest, second)
    divisor = (divided / (1 - s["beta2"] ** steps)).sqrt() + s["eps"]
    unbiased = first / (1 - s["beta1"] ** steps)
    terms = (s["beta1"] * state["first"].abs() + (1 - s["beta1"]) * gradient.abs()) / (
        1 - s["beta1"] ** steps
    )
    return Step(
        values - s["rate"] * (unbiased / divisor + decays * values),
        {"first": first, "second": second, "highest": highest, "steps": steps},
        s["rate"] * (terms / divisor + decays * values.abs()),
        {
            "first": first.abs() + gradient.abs(),
            "second": second + gradient**2,
            "highest": highest,
            "steps": torch.zeros_like(steps),
        },
    )


def sgd(values: torch.Tensor, gradient: torch.Tensor, state: Elements, settings: Elements) -> Step:
    """SGD. The first gradient with momentum is taken whole.

    Args:
        state: `velocity`, the running sum of gradients; `moving`, 1 where there is one.
        settings: `rate`, `momentum`, `dampening`, `weight_decay`, `nesterov`, `maximize`.
    """
    s = settings
    gradient = _downwards(gradient, s) + s["weight_decay"] * values
    sizes = gradient.abs() + s["weight_decay"] * values.abs()
    moves = s["momentum"] > 0
    velocity = torch.where(
        state["moving"] > 0, s["momentum"] * state["velocity"] + (1 - s["dampening"]) * gradient, gradient
    )
    large = torch.where(
        state["moving"] > 0, s["momentum"] * state["velocity"].abs() + (1 - s["dampening"]) * sizes, sizes
    )
    ahead = s["nesterov"] > 0
    step = torch.where(ahead, gradient + s["momentum"] * velocity, velocity)
    size = torch.where(ahead, sizes + s["momentum"] * large, large)
    return Step(
        values - s["rate"] * torch.where(moves, step, gradient),
        {
            "velocity": torch.where(moves, velocity, state["velocity"]),
            "moving": torch.where(moves, 1.0, state["moving"]),
        },
        s["rate"] * torch.where(moves, size, sizes),
        {"velocity": large, "moving": torch.zeros_like(large)},
    )


def rmsprop(values: torch.Tensor, gradient: torch.Tensor, state: Elements, settings: Elements) -> Step:
    """RMSprop.

    Args:
        state: `square` and `mean`, running means of the square of the gradient and (centered) of the gradient;
            `velocity`, the running sum of changes; `steps`.
        settings: `rate`, `alpha`, `eps`, `momentum`, `weight_decay`, `centered`, `maximize`.
    """
    s = settings
    gradient = _downwards(gradient, s) + s["weight_decay"] * values
    sizes = gradient.abs() + s["weight_decay"] * values.abs()
    square = s["alpha"] * state["square"] + (1 - s["alpha"]) * gradient**2
    centered = s["centered"] > 0
    mean = torch.where(centered, s["alpha"] * state["mean"] + (1 - s["alpha"]) * gradient, state["mean"])
    spread = torch.where(centered, square - mean**2, square)
    divisor = spread.clamp(min=0).sqrt() + s["eps"]
    # The difference of two large numbers has the rounding of both.
    blurred = torch.where(square > 0, 1 + torch.where(centered, square / spread.clamp(min=1e-30), 0.0), 1.0)
    change, large = gradient / divisor, sizes / divisor * blurred
    moves = s["momentum"] > 0
    velocity = torch.where(moves, s["momentum"] * state["velocity"] + change, state["velocity"])
    most = torch.where(moves, s["momentum"] * state["velocity"].abs() + large, large)
    steps = state["steps"] + 1
    return Step(
        values - s["rate"] * torch.where(moves, velocity, change),
        {"square": square, "mean": mean, "velocity": velocity, "steps": steps},
        s["rate"] * most,
        {
            "square": square + gradient**2,
            "mean": mean.abs() + gradient.abs(),
            "velocity": most,
            "steps": torch.zeros_like(steps),
        },
    )


def adagrad(values: torch.Tensor, gradient: torch.Tensor, state: Elements, settings: Elements) -> Step:
    """Adagrad.

    Args:
        state: `sum` of the squares of all gradients; `steps`.
        settings: `rate`, `lr_decay`, `eps`, `weight_decay`, `maximize`.
    """
    s = settings
    gradient = _downwards(gradient, s) + s["weight_decay"] * values
    sizes = gradient.abs() + s["weight_decay"] * values.abs()
    total = state["sum"] + gradient**2
    rate = s["rate"] / (1 + state["steps"] * s["lr_decay"])
    divisor = total.sqrt() + s["eps"]
    steps = state["steps"] + 1
    return Step(
        values - rate * gradient / divisor,
        {"sum": total, "steps": steps},
        rate * sizes / divisor,
        {"sum": total + gradient**2, "steps": torch.zeros_like(steps)},
    )


# The sign of a sum that is so small beside its terms is that of its rounding.
_UNDECIDED = 1e-5


def lion(values: torch.Tensor, gradient: torch.Tensor, state: Elements, settings: Elements) -> Step:
    """Lion.

    Args:
        state: `first`, a running mean of the gradient.
        settings: `rate`, `beta1`, `beta2`, `weight_decay`.
    """
    s = settings
    between = s["beta1"] * state["first"] + (1 - s["beta1"]) * gradient
    terms = s["beta1"] * state["first"].abs() + (1 - s["beta1"]) * gradient.abs()
    undecided = (between.abs() <= _UNDECIDED * terms) & (terms > 0)
    first = s["beta2"] * state["first"] + (1 - s["beta2"]) * gradient
    size = s["rate"] * (1 + s["weight_decay"] * values.abs())
    return Step(
        values - s["rate"] * (between.sign() + s["weight_decay"] * values),
        {"first": first},
        torch.where(undecided, torch.inf, size),
        {"first": first.abs() + gradient.abs()},
    )


def _downwards(gradient: torch.Tensor, settings: Elements) -> torch.Tensor:
    return torch.where(settings["maximize"] > 0, -gradient, gradient)


@dataclass(frozen=True, slots=True)
class Factors:
    """Adafactor's means of squares for one tensor, float64.

    Attributes:
        rows, columns: (..., n) and (..., m) means over the columns, and over the rows, of (..., n, m) matrices; None
            of a vector.
        squares: (n,) means of a vector's squares; None of matrices.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    squares: torch.Tensor | None


def no_factors(gradient: torch.Tensor) -> Factors:
    """The means before the first step, which keeps nothing of them."""
    zeros = gradient.new_zeros((), dtype=torch.float64).expand(gradient.shape)
    if gradient.dim() < 2:
        return Factors(None, None, zeros)
    return Factors(zeros[..., 0], zeros[..., 0, :], None)


def adafactor_factors(gradient: torch.Tensor, factors: Factors, kept: float, epsilon: float) -> Factors:
    """The means after a step.

    Args:
        gradient: the tensor's whole gradient.
        factors: the means before.
        kept: share of the means before, 1 − t^decay_rate in step t.
        epsilon: what is added to every square.
    """
    new = _factors(gradient, epsilon)
    pairs = zip(
        (factors.rows, factors.columns, factors.squares), (new.rows, new.columns, new.squares), strict=True
    )
    return Factors(*(None if a is None or b is None else kept * a + (1 - kept) * b for a, b in pairs))


def _factors(gradient: torch.Tensor, epsilon: float) -> Factors:
    if gradient.dim() < 2:
        return Factors(None, None, gradient.double() ** 2 + epsilon)
    height, width = gradient.shape[-2:]
    rows, columns = [], gradient.new_zeros((*gradient.shape[:-2], width), dtype=torch.float64)
    for part in _row_parts(gradient):
        squares = part**2 + epsilon
        rows.append(squares.mean(-1))
        columns += squares.sum(-2) / height
    return Factors(torch.cat(rows, -1), columns, None)


def adafactor_update(
    places: torch.Tensor, gradient: torch.Tensor, factors: Factors, threshold: float
) -> torch.Tensor:
    """(N,) what Adafactor subtracts from some elements of a tensor, divided by the rate; without decay and momentum.

    Args:
        places: (N,) places of the elements in the flattened tensor.
        gradient: the tensor's whole gradient.
        factors: the means after this step.
        threshold: the largest root mean square of the whole update.
    """
    if factors.squares is not None:
        scales = factors.squares.rsqrt().flatten()[places]
        total = (gradient.double() ** 2 / factors.squares).sum()
    else:
        assert factors.rows is not None
        assert factors.columns is not None
        height, width = gradient.shape[-2:]
        by_row = (factors.rows / factors.rows.mean(-1, keepdim=True)).rsqrt()
        by_column = factors.columns.rsqrt()
        starts = range(0, height, _rows_at_once(gradient))
        total = torch.stack(
            [
                ((part * by_row[..., at : at + part.shape[-2], None] * by_column[..., None, :]) ** 2).sum()
                for at, part in zip(starts, _row_parts(gradient), strict=True)
            ]
        ).sum()
        matrix, row, column = places // (height * width), places // width, places % width
        scales = by_row.flatten()[row] * by_column.reshape(-1, width)[matrix, column]
    size = (total / gradient.numel()).sqrt()
    return gradient.flatten()[places].double() * scales / (size / threshold).clamp(min=1.0)


# Elements of a gradient that are held in float64 at a time.
_AT_ONCE = 1 << 22


def _rows_at_once(gradient: torch.Tensor) -> int:
    return max(1, _AT_ONCE * gradient.shape[-2] // max(gradient.numel(), 1))


def _row_parts(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """The float64 values of (..., n, m) matrices, some rows at a time."""
    return (part.double() for part in gradient.split(_rows_at_once(gradient), dim=-2))
