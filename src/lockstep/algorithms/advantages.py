"""Advantages: of completions relative to others, and of single tokens from returns.

Rewards are one tensor per group. NaN is the reward of a completion that no reward function scored: it is left out of
every mean and standard deviation, and the advantage of its completion is 0. Equal rewards give advantages of exactly
zero.

None of the targets of a value function carries a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from lockstep.algorithms.segments import Segments

ScaleRewards = Literal["group", "batch", "advantages", "none"]

# TRL's constant, kept so that curves can be compared.
_EPSILON = 1e-4


def group_advantages(rewards: list[torch.Tensor], scale: ScaleRewards) -> list[torch.Tensor]:
    """Rewards minus their group's mean, divided by a standard deviation (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        rewards: one (G_i,) tensor per group; groups may differ in size.
        scale: `group` divides by the group's own standard deviation. `batch` divides by the standard deviation of all
            rewards. `advantages` divides by the standard deviation of all differences to the group means (ScaleRL,
            arXiv 2510.13786: the difference between groups does not tell how hard they are to improve on). `none`
            does not divide (Dr. GRPO, arXiv 2503.20783: scaling favours groups with a small spread).

    Returns:
        One (G_i,) tensor per group. A group of equal rewards has advantages of exactly zero.
    """
    centred = [_centred(group) for group in rewards]
    if scale == "group":
        centred = [own / (_deviation(group) + _EPSILON) for own, group in zip(centred, rewards, strict=True)]
    elif scale in ("batch", "advantages") and rewards:
        spread = _deviation(torch.cat(rewards if scale == "batch" else centred))
        centred = [own / (spread + _EPSILON) for own in centred]
    return [own.nan_to_num(nan=0.0) for own in centred]


def normalised_reward_advantages(scores: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Scale each reward function in its group, sum the functions, then scale over the batch (GDPO, arXiv 2601.05242).

    So a function with large numbers does not outweigh the others, and two groups with the same sum remain distinct.

    Args:
        scores: one (G_i, K) tensor per group, for K reward functions; NaN if a function gave no score.
        weights: (K,) weight of each function, applied after the scaling.

    Returns:
        One (G_i,) tensor per group.
    """
    totals = []
    for group in scores:
        scaled = torch.stack([_standardised(column) for column in group.unbind(1)], dim=1)
        unscored = group.isnan().all(1)
        totals.append((scaled * weights.to(scaled)).nansum(1).masked_fill(unscored, torch.nan))
    if not totals:
        return []
    return list(whiten(torch.cat(totals)).split([len(group) for group in totals]))


def leave_one_out_advantages(rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each reward minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740).

    Args:
        rewards: one (G_i,) tensor per group.

    Returns:
        One (G_i,) tensor per group; 0 if no other completion of the group was scored.
    """
    advantages = []
    for group in rewards:
        count = int((~group.isnan()).sum())
        # r − (S − r) / (n − 1) is n / (n − 1) times r − S / n.
        advantages.append((_centred(group) * (count / max(count - 1, 1))).nan_to_num(nan=0.0))
    return advantages


def varies(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards give a training signal: at least two of them differ in float32. NaN is left out."""
    return not _agree(torch.tensor(rewards, dtype=torch.float32))


def compared(rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    """(G_i,) bool per group of (G_i,) rewards: whether a completion and another one of its group were scored.

    This is the mask with which `whiten` takes their advantages.
    """
    scored = [~group.isnan() for group in rewards]
    return [group & bool(group.sum() > 1) for group in scored]


def whiten(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Scale values to mean 0 and a standard deviation of just under 1 (the divisor is the deviation + 1e-4).

    Args:
        values: (N,) values of a batch; NaN counts as masked out.
        mask: (N,) bool, True for the values that count; None if all count.

    Returns:
        (N,) scaled values; 0 for values that do not count.
    """
    counted = values if mask is None else values.masked_fill(~mask, torch.nan)
    return _standardised(counted).nan_to_num(nan=0.0)


def _standardised(values: torch.Tensor) -> torch.Tensor:
    return _centred(values) / (_deviation(values) + _EPSILON)


def _centred(values: torch.Tensor) -> torch.Tensor:
    """Values minus their mean. NaN stays NaN."""
    # In floating point, the mean of equal numbers can differ from that number.
    if _agree(values):
        return values.masked_fill(~values.isnan(), 0.0)
    return values - values[~values.isnan()].mean()


def _agree(values: torch.Tensor) -> bool:
    """Whether all values are equal. NaN is left out."""
    scored = values[~values.isnan()]
    return bool((scored == scored[:1]).all())


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation with Bessel's correction; 0 for fewer than two values. NaN is left out."""
    scored = values[~values.isnan()]
    return scored.std() if len(scored) > 1 else values.new_zeros(())


@torch.no_grad()
def rewards_to_go(
    rewards: torch.Tensor, kl: torch.Tensor, beta: float, segments: Segments, gamma: float = 1.0
) -> torch.Tensor:
    """Sum of the future rewards of a completion at each of its tokens (REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: (B,) score of each completion, given at its last token.
        kl: (N,) estimate of KL(policy ‖ reference) at each token, in nats.
        beta: penalty per nat.
        segments: the completions; a completion without tokens has no reward.
        gamma: discount per token.

    Returns:
        (N,) discounted sums, up to the end of the completion, of the score minus beta × KL.
    """
    earned = -beta * kl
    written = segments.lengths > 0
    last = segments.lengths.cumsum(0) - 1
    earned = earned.index_add(0, last[written], rewards[written].to(earned.dtype))
    return _discounted_sums(earned, gamma, segments)


@torch.no_grad()
def generalised_advantages(
    token_rewards: torch.Tensor, values: torch.Tensor, segments: Segments, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16).

    Args:
        token_rewards: (N,) reward earned at each token.
        values: (N,) the value function's estimate before each token. After a completion's last token the value is 0.
        segments: the completions.
        gamma: discount per token.
        lam: weight of longer returns: 0 uses one step, 1 all remaining steps.

    Returns:
        (N,) advantages and (N,) returns. The returns are advantages + values, the targets of the value function.
    """
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    same = segments.ids[1:] == segments.ids[:-1]
    same = torch.cat([same, same.new_zeros(1)])[: len(values)]
    surprise = token_rewards + gamma * following.masked_fill(~same, 0.0) - values
    advantages = _discounted_sums(surprise, gamma * lam, segments)
    return advantages, advantages + values


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """PPO's value loss, as its implementations have it: moving beyond `clip_range` from the old estimate gains nothing.

    Args:
        values: (N,) estimates, with gradient.
        old_values: (N,) estimates at the time of sampling.
        returns: (N,) targets.
        clip_range: largest distance from the old estimate at which moving towards the target still lowers the loss.

    Returns:
        (N,) half of the larger of the squared errors with and without the clip.
    """
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def _discounted_sums(values: torch.Tensor, decay: float, segments: Segments) -> torch.Tensor:
    """(N,) Σ over k of decay^k × the value k tokens later, up to the completion's end, by one operation per place."""
    if len(values) == 0:
        return values.clone()
    ends = segments.lengths.cumsum(0)
    # Each row is reversed, so that every completion's last token is in column 0.
    column = segments.spread(ends) - 1 - torch.arange(len(values), device=values.device)
    padded = values.new_zeros(len(ends), int(segments.lengths.max()))
    padded[segments.ids, column] = values
    carried = torch.zeros_like(padded[:, 0])
    for step in padded.unbind(1):
        carried = step.add_(carried, alpha=decay)
    return padded[segments.ids, column]
