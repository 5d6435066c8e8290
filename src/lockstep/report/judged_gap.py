"""What a run's receipt says about the gap and its limits: over which tokens a figure was judged, and which came closest.

In half precision the means of few tokens are judged together with those of later steps. A single step may then be above a limit
without a fault. The page of a run, its summary and the command line therefore show the figures that were judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Line = dict[str, Any]
# The figures of a gap, with the names of their limits and of a single step's sum, which has no name for the largest gap.
MEANS = {"mean_abs_gap": ("mean_allowed", "sum_abs_gap"), "k3": ("k3_allowed", "sum_k3")}
_NAMES = {"mean_abs_gap": "mean", "k3": "k3", "max_abs_gap": "largest"}


class Judged(NamedTuple):
    """A figure that was compared with its limit.

    Attributes:
        lines: the receipt's lines of the steps whose tokens it has.
        tokens: how many these are.
    """

    name: str
    figure: float
    limit: float
    lines: Sequence[Line]
    tokens: int

    @property
    def share(self) -> float:
        """The figure's share of its limit."""
        return self.figure / self.limit if self.limit else 0.0

    @property
    def where(self) -> str:
        """The steps and the number of tokens, in words."""
        first, last = self.lines[0]["step"], self.lines[-1]["step"]
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        return f"{steps}, {self.tokens} tokens"

    @property
    def text(self) -> str:
        """The figure, its limit and where it was found."""
        return f"{_NAMES[self.name]} {self.figure:.2g} of {self.limit:.2g} ({self.where})"


def judged_means(steps: Sequence[Line], name: str) -> list[Judged]:
    """Every value of a mean that was compared with its limit; empty for a run whose receipt does not have them.

    Args:
        steps: the receipt's lines of steps, in their order.
        name: a key of `MEANS`.
    """
    found, lines = list[Judged](), list[Line]()
    for line in steps:
        lines += [line] if line.get("checked_tokens") else []
        if (judged := line.get("judged")) and lines:
            found.append(Judged(name, judged[name], judged[MEANS[name][0]], lines, judged["tokens"]))
        if "waiting" not in line:
            lines = []
    return found


def largest_gaps(steps: Sequence[Line], otherwise: float) -> list[Judged]:
    """The largest gap of every step. It is compared with its limit at once.

    Args:
        otherwise: the limit for a line without one.
    """
    return [
        Judged("max_abs_gap", s["max_abs_gap"], s.get("max_allowed", otherwise), [s], s["checked_tokens"])
        for s in steps
        if s.get("checked_tokens")
    ]


def closest(judged: Sequence[Judged]) -> Judged | None:
    """The figure with the largest share of its limit."""
    return max(judged, key=lambda one: one.share, default=None)


def closest_of_run(steps: Sequence[Line]) -> Judged | None:
    """The figure of the gap that came closest to its limit; None for a run whose receipt does not have what was judged."""
    largest = largest_gaps([line for line in steps if "max_allowed" in line], 0.0)
    means = [one for name in MEANS for one in judged_means(steps, name)]
    return closest([*means, *largest]) if means else None


def mean_of(lines: Sequence[Line], name: str) -> float:
    """A mean over the tokens of several lines, or of one."""
    tokens = sum(line["checked_tokens"] for line in lines)
    return sum(line[MEANS[name][1]] for line in lines) / tokens if tokens else 0.0


def alone_above(judged: Sequence[Judged]) -> list[Line]:
    """The lines of single steps whose own mean is above the limit of the judgement that they were a part of."""
    return [line for one in judged for line in one.lines if mean_of([line], one.name) > one.limit]


def steps_alone(lines: Sequence[Line], name: str) -> str:
    """Single steps with their means, in words; empty without lines."""
    shown = [f"{line['step']} ({mean_of([line], name):.2g} over {line['checked_tokens']})" for line in lines[:3]]
    more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    word = "step" if len(lines) == 1 else "steps"
    return f"alone above the limit, not judged alone: {word} {', '.join(shown)}{more}" if lines else ""


def waiting_tokens(steps: Sequence[Line]) -> int:
    """The number of tokens at the end whose means were not judged."""
    return int(steps[-1].get("waiting", {}).get("tokens", 0)) if steps else 0
