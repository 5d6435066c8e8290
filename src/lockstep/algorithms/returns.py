"""Returns and advantages of single tokens, and the loss of a value function. None of the targets carries a gradient."""

from __future__ import annotations

import torch

from lockstep.algorithms.segments import Segments


@torch.no_grad()
def rewards_to_go(
    rewards: torch.Tensor,
    kl: torch.Tensor,
    beta: float,
    segments: Segments,
    gamma: float = 1.0,
) -> torch.Tensor:
    """What a completion still earns from each of its tokens on (REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: (B,) score of each completion, earned at its last token.
        kl: (N,) estimate of KL(policy ‖ reference) at each token, in nats.
        beta: price of a nat.
        segments: the completions; one without tokens earns nothing.
        gamma: discount a token.

    Returns:
        (N,) discounted sums, to the end of the completion, of the score minus beta × KL.
    """
    earned = -beta * kl
    written = segments.lengths > 0
    last = segments.lengths.cumsum(0) - 1
    return _discounted_sums(earned.index_add(0, last[written], rewards[written].to(earned.dtype)), gamma, segments)


@torch.no_grad()
def generalised_advantages(
    token_rewards: torch.Tensor, values: torch.Tensor, segments: Segments, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16).

    Args:
        token_rewards: (N,) reward earned at each token.
        values: (N,) the value function's estimate before each token; after a completion's last token the value is 0.
        segments: the completions.
        gamma: discount a token.
        lam: weight of longer returns: 0 for one step, 1 for all that remain.

    Returns:
        (N,) advantages and (N,) returns, the targets of the value function: advantages + values.
    """
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    same = torch.cat([segments.ids[1:] == segments.ids[:-1], segments.ids.new_zeros(1, dtype=torch.bool)])[
        : len(values)
    ]
    surprise = token_rewards + gamma * following.masked_fill(~same, 0.0) - values
    advantages = _discounted_sums(surprise, gamma * lam, segments)
    return advantages, advantages + values


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """PPO's loss of a value function that may move `clip_range` from where it was, as its implementations have it.

    Args:
        values: (N,) estimates, with gradient.
        old_values: (N,) estimates at the time of sampling.
        returns: (N,) targets.
        clip_range: distance from the old estimate beyond which moving towards the target earns nothing.

    Returns:
        (N,) half the larger one of the squared errors with and without the clip.
    """
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def _discounted_sums(values: torch.Tensor, decay: float, segments: Segments) -> torch.Tensor:
    """(N,) Σ decay^k × the value k tokens later, to the completion's end: one vector step a token, over all completions."""
    if len(values) == 0:
        return values.clone()
    ends = segments.lengths.cumsum(0)
    # Rows read from the last token backwards, so that every completion starts in column 0.
    column = segments.spread(ends) - 1 - torch.arange(len(values), device=values.device)
    padded = values.new_zeros(len(ends), int(segments.lengths.max()))
    padded[segments.ids, column] = values
    carried = torch.zeros_like(padded[:, 0])
    for step in padded.unbind(1):
        carried = step.add_(carried, alpha=decay)
    return padded[segments.ids, column]
