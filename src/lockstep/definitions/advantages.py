"""The advantages of every method, computed from rewards as the papers define them, with plain Python numbers.

`parity/step/advantages.py` compares the advantages that enter the loss with these. A reward of None means that no function scored
the completion. Such a completion is left out of means and deviations, and its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Rewards = Sequence[float | None]
# TRL's constant, which keeps the division by a deviation of zero finite.
SMALL = 1e-4


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 if there are no values."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 if there are fewer than two values."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def given(values: Rewards) -> list[float]:
    """The values without None."""
    return [v for v in values if v is not None]


def whitened(values: Rewards) -> list[float | None]:
    """(value − mean) / (deviation + 1e-4). None stays None, and is left out of mean and deviation."""
    there = given(values)
    middle, spread = mean(there), deviation(there)
    return [None if v is None else (v - middle) / (spread + SMALL) for v in values]


def centred(group: Rewards) -> list[float | None]:
    """Each reward minus the mean of its group."""
    middle = mean(given(group))
    return [None if r is None else r - middle for r in group]


def grpo(groups: Sequence[Rewards], scale: str) -> list[list[float | None]]:
    """GRPO (arXiv 2402.03300, section 4.1): (reward − mean of the group) / deviation.

    Args:
        scale: which standard deviation is the divisor. `group`: that of the group's rewards. `batch`: that of all rewards of the
            batch. `advantages`: that of all differences (reward − mean of the group). `none`: there is no division.
    """
    differences = [centred(group) for group in groups]
    if scale == "none":
        return differences
    every = [r for group in (groups if scale == "batch" else differences) for r in given(group)]
    spreads = [deviation(given(group) if scale == "group" else every) for group in groups]
    return [
        [None if d is None else d / (spread + SMALL) for d in own]
        for own, spread in zip(differences, spreads, strict=True)
    ]


def gdpo(groups: Sequence[Sequence[Rewards]], weights: Sequence[float]) -> list[float | None]:
    """GDPO (arXiv 2601.05242).

    The scores of each function are whitened in their group, added up with weights, and whitened again over the batch.

    Args:
        groups: per group and per reward function, the scores of the group's completions.

    Returns:
        One advantage per completion of all groups.
    """
    totals: list[float | None] = []
    for functions in groups:
        scaled = [whitened(scores) for scores in functions]
        for own in zip(*scaled, strict=True):
            there = [w * s for w, s in zip(weights, own, strict=True) if s is not None]
            totals.append(math.fsum(there) if there else None)
    return whitened(totals)


def leave_one_out(group: Rewards) -> list[float | None]:
    """RLOO (arXiv 2402.14740): each reward minus the mean of the other rewards of its group; 0 if there are no others."""
    there = given(group)
    total, others = math.fsum(there), max(len(there) - 1, 1)
    return [None if r is None else (r - (total - r) / others if len(there) > 1 else 0.0) for r in group]


def compared(group: Rewards) -> list[bool]:
    """Which completions have a reward, and at least one other completion with a reward in their group."""
    several = len(given(group)) > 1
    return [several and r is not None for r in group]


def returns_to_go(reward: float, divergences: Sequence[float], beta: float, gamma: float) -> list[float]:
    """REINFORCE++ (arXiv 2501.03262): the discounted sum of token rewards, from each token to the last.

    The reward of a token is −beta × KL. The last token also has the reward of the completion.
    """
    sums: list[float] = []
    after = 0.0
    for place, divergence in reversed(list(enumerate(divergences))):
        own = -beta * divergence + (reward if place == len(divergences) - 1 else 0.0)
        after = own + gamma * after
        sums.append(after)
    return sums[::-1]


def generalised(
    reward: float, divergences: Sequence[float], values: Sequence[float], beta: float, gamma: float, lam: float
) -> list[float]:
    """Generalised advantage estimates (arXiv 1506.02438, equation 16) of one completion.

    The reward of a token is −beta × KL. The last token also has the reward of the completion.
    """
    advantages: list[float] = []
    carried = following = 0.0
    for place in reversed(range(len(values))):
        own = -beta * divergences[place] + (reward if place == len(values) - 1 else 0.0)
        carried = own + gamma * following - values[place] + gamma * lam * carried
        following = values[place]
        advantages.append(carried)
    return advantages[::-1]


def preference(first: float | None, second: float | None) -> tuple[float, float]:
    """Online DPO (arXiv 2402.04792): 1 for the better completion of a pair and −1 for the other; 0 and 0 if neither is better."""
    if first is None or second is None or first == second:
        return 0.0, 0.0
    return (1.0, -1.0) if first > second else (-1.0, 1.0)
