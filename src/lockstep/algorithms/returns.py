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
    return _discounted_sums(earned.index_add(0, last[written], rewards[written].to(earned.dtype)), gamma, segments)


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
    same = torch.cat([segments.ids[1:] == segments.ids[:-1], segments.ids.new_zeros(1, dtype=torch.bool)])[
        : len(values)
    ]
    surprise = token_rewards + gamma * following.masked_fill(~same, 0.0) - values
    advantages = _discounted_sums(surprise, gamma * lam, segments)
    return advantages, advantages + values


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """PPO's value loss, as its implementations have it: beyond `clip_range` from the old estimate, moving further gains nothing.

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
    """(N,) Σ over k of decay^k × the value k tokens later, up to the completion's end. One vector operation per position."""
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
