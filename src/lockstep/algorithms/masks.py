"""The tokens that a policy loss leaves out. A mask multiplies the loss; it does not change the step's token weights."""

from __future__ import annotations

import numpy as np
import torch

from lockstep.algorithms.segments import Segments


@torch.no_grad()
def off_policy_mask(
    logps: torch.Tensor,
    behaviour_logps: torch.Tensor,
    advantages: torch.Tensor,
    segments: Segments,
    threshold: float,
) -> torch.Tensor:
    """Drop completions with a negative advantage that the policy has become unlikely to write (DeepSeek-V3.2, arXiv 2512.02556).

    Args:
        logps: (N,) log-probs under the policy.
        behaviour_logps: (N,) log-probs under the policy that sampled.
        advantages: (N,) advantage of each token's completion.
        segments: the completions.
        threshold: nats per token. A completion with a negative advantage is dropped if its mean of behaviour − policy log-prob
            exceeds this.

    Returns:
        (N,) 1.0 for a token that is kept, 0.0 for a dropped token.
    """
    drift = segments.spread(segments.means(behaviour_logps - logps))
    return ((advantages >= 0) | (drift <= threshold)).to(logps.dtype)


@torch.no_grad()
def high_entropy_mask(entropies: torch.Tensor, share: float) -> torch.Tensor:
    """The tokens at which the policy was least certain (arXiv 2506.01939).

    Args:
        entropies: (N,) entropy in nats at each token that counts. The threshold is computed from these values alone.
        share: share of the tokens to keep, in (0, 1].

    Returns:
        (N,) bool, True where the entropy reaches the (1 − share) quantile, interpolated linearly. All True for a share of 1.
    """
    if entropies.numel() == 0:
        return torch.zeros_like(entropies, dtype=torch.bool)
    # torch.quantile takes at most 2**24 values, and sorts them all.
    values = entropies.float()
    place = (1 - share) * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    ranked = torch.from_numpy(np.partition(values.cpu().numpy(), (below, above))).to(values.device)
    return entropies >= torch.lerp(ranked[below], ranked[above], place - below)
