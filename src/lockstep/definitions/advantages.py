"""Advantages and token weights as the papers define them, with plain Python numbers.

What enters the loss is compared with them. A reward of None means that no function scored the completion. Such a
completion is left out of means and deviations, and its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

Rewards = Sequence[float | None]
# TRL's constant, which keeps the division by a deviation of zero finite.
EPSILON = 1e-4


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 if there are no values."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 if there are fewer than two values."""
    if len(values) < 2:
        return 0.0
    average = mean(values)
    return math.sqrt(math.fsum((v - average) ** 2 for v in values) / (len(values) - 1))


def scored(values: Rewards) -> list[float]:
    """The values without None."""
    return [v for v in values if v is not None]


def whitened(values: Rewards) -> list[float | None]:
    """(value − mean) / (deviation + 1e-4). None stays None, and is left out of mean and deviation."""
    present = scored(values)
    average, spread = mean(present), deviation(present)
    return [None if v is None else (v - average) / (spread + EPSILON) for v in values]


def centred(group: Rewards) -> list[float | None]:
    """Each reward minus the mean of its group."""
    average = mean(scored(group))
    return [None if r is None else r - average for r in group]


def grpo(groups: Sequence[Rewards], scale: str) -> list[list[float | None]]:
    """GRPO (arXiv 2402.03300, section 4.1): (reward − mean of the group) / deviation.

    Args:
        scale: which standard deviation is the divisor. `group`: that of the group's rewards. `batch`: that of all
            rewards of the batch. `advantages`: that of all differences (reward − mean of the group). `none`: there is
            no division.
    """
    differences = [centred(group) for group in groups]
    if scale == "none":
        return differences
    all_values = [r for group in (groups if scale == "batch" else differences) for r in scored(group)]
    spreads = [deviation(scored(group) if scale == "group" else all_values) for group in groups]
    pairs = zip(differences, spreads, strict=True)
    return [[None if d is None else d / (spread + EPSILON) for d in values] for values, spread in pairs]


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
        for scores_of_completion in zip(*scaled, strict=True):
            present = [w * s for w, s in zip(weights, scores_of_completion, strict=True) if s is not None]
            totals.append(math.fsum(present) if present else None)
    return whitened(totals)


def leave_one_out(group: Rewards) -> list[float | None]:
    """RLOO (arXiv 2402.14740): each reward minus the mean of the others of its group; 0 if there are no others."""
    present = scored(group)
    total, others = math.fsum(present), max(len(present) - 1, 1)
    return [None if r is None else (r - (total - r) / others if len(present) > 1 else 0.0) for r in group]


def has_comparison(group: Rewards) -> list[bool]:
    """Which completions have a reward, and at least one other completion with a reward in their group."""
    several = len(scored(group)) > 1
    return [several and r is not None for r in group]


def returns_to_go(reward: float, divergences: Sequence[float], beta: float, gamma: float) -> list[float]:
    """REINFORCE++ (arXiv 2501.03262): the discounted sum of token rewards, from each token to the last.

    The reward of a token is −beta × KL. The last token also has the reward of the completion.
    """
    sums: list[float] = []
    following = 0.0
    for position, divergence in reversed(list(enumerate(divergences))):
        token_reward = -beta * divergence + (reward if position == len(divergences) - 1 else 0.0)
        following = token_reward + gamma * following
        sums.append(following)
    return sums[::-1]


def gae(
    reward: float,
    divergences: Sequence[float],
    values: Sequence[float],
    beta: float,
    gamma: float,
    lam: float,
) -> list[float]:
    """Generalised advantage estimates (arXiv 1506.02438, equation 16) of one completion.

    The reward of a token is −beta × KL. The last token also has the reward of the completion.
    """
    advantages: list[float] = []
    advantage = next_value = 0.0
    for position in reversed(range(len(values))):
        token_reward = -beta * divergences[position] + (reward if position == len(values) - 1 else 0.0)
        advantage = token_reward + gamma * next_value - values[position] + gamma * lam * advantage
        next_value = values[position]
        advantages.append(advantage)
    return advantages[::-1]


def preference(first: float | None, second: float | None) -> tuple[float, float]:
    """Online DPO (arXiv 2402.04792): 1 for the better completion of a pair, −1 for the other; twice 0 if none is."""
    if first is None or second is None or first == second:
        return 0.0, 0.0
    return (1.0, -1.0) if first > second else (-1.0, 1.0)


def token_weights(lengths: Sequence[int], average: str, limit: int) -> list[float]:
    """The weight of one token of each completion of a step.

    Args:
        lengths: tokens of each completion; 0 if it is left out. It still counts in the number of completions.
        average: `completions`: over the tokens of a completion, then over completions (GRPO). `tokens`: over all
            tokens (DAPO). `limit`: a sum over tokens, divided by completions × `limit` (Dr. GRPO). `sums`: a sum over
            tokens, averaged over completions (LUSPO). `whole`: a completion has one loss, averaged over completions
            (RLOO). `pairs`: a pair has one loss, averaged over pairs (DPO).
        limit: the largest number of tokens of a completion.
    """
    count, total = len(lengths), max(sum(lengths), 1)
    weight = {
        "completions": lambda n: 1 / (max(n, 1) * count),
        "tokens": lambda n: 1 / total,
        "limit": lambda n: 1 / (count * limit),
        "sums": lambda n: 1 / count,
        "whole": lambda n: 1 / count,
        "pairs": lambda n: 2 / count,
    }[average]
    return [weight(n) if n else 0.0 for n in lengths]


def prompt_weights(lengths: Sequence[int], prompts: Sequence[Hashable]) -> list[float]:
    """ScaleRL's weight of a token (arXiv 2510.13786): the mean over the tokens of a prompt, then over prompts.

    Args:
        lengths: tokens of each completion; 0 if it is left out.
        prompts: the prompt of each completion.
    """
    tokens: dict[Hashable, int] = {}
    for length, prompt in zip(lengths, prompts, strict=True):
        tokens[prompt] = tokens.get(prompt, 0) + length
    return [1 / (tokens[p] * len(tokens)) if n else 0.0 for n, p in zip(lengths, prompts, strict=True)]
