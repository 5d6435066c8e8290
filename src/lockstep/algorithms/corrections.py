"""What a loss corrects, leaves out and adds: importance corrections, masks, and the divergence from the reference.

Corrections are for a parity gap that was measured and accepted. A mask multiplies the loss; it does not change the
step's token weights.

The estimators of KL(policy ‖ reference) are Schulman's (http://joschu.net/blog/kl-approx.html). For tokens sampled
from the policy, the mean of k1 and of k3 is the divergence, and the mean gradient of k2 is the divergence's gradient.
(The mean gradient of k1 is zero; that of k3 is the gradient of KL(reference ‖ policy).) GRPO adds k3 to its loss
(arXiv 2402.03300, equation 4).

Each takes (N,) log-probs under the policy and under the reference model, and returns (N,) nats, differentiable in both.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch

from lockstep.algorithms.segments import Segments

CorrectionMode = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask"
]


@torch.no_grad()
def importance_weights(
    policy_logps: torch.Tensor,
    behaviour_logps: torch.Tensor,
    segments: Segments,
    mode: CorrectionMode,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """Importance weights π_trainer / π_engine, bounded so that no token or completion dominates.

    The engine samples a token, and the trainer differentiates its log-prob. The weight corrects the difference in
    their numerics.

    Args:
        policy_logps: (N,) the trainer's log-probs under the weight version that sampled.
        behaviour_logps: (N,) the engine's log-probs.
        segments: the completions.
        mode:
            `token_truncate`: each token's ratio, clamped to the bounds (TIS);
            `token_mask`: each token's ratio, 0 outside the bounds (with both bounds set: IcePop);
            `sequence_truncate`, `sequence_mask`: the same, with the product of a completion's ratios at each of its
            tokens (the product vanishes or explodes with length: TRL #5814);
            `sequence_geometric_mask`: 1 for every token of a completion whose geometric mean ratio lies within the
            bounds, otherwise 0.
        clip_min: lower bound of a ratio; None: no lower bound.
        clip_max: upper bound of a ratio; None: no upper bound.

    Returns:
        (N,) weights without gradient. All are 1 if both sides agree exactly and 1 lies within the bounds.
    """
    ratios = _ratios(policy_logps - behaviour_logps, segments, mode)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if mode in ("token_truncate", "sequence_truncate"):
        return ratios.clamp(low, high)
    outside = (ratios < low) | (ratios > high)
    # The ratio of a missing log-prob is NaN. NaN is not outside the bounds, and stays NaN.
    kept = ratios.masked_fill(~ratios.isnan(), 1.0) if mode == "sequence_geometric_mask" else ratios
    return kept.masked_fill(outside, 0.0)


def _ratios(differences: torch.Tensor, segments: Segments, mode: CorrectionMode) -> torch.Tensor:
    if mode in ("token_truncate", "token_mask"):
        return differences.exp()
    if mode == "sequence_geometric_mask":
        return segments.spread(segments.means(differences).exp())
    return segments.spread(segments.sums(differences).exp())


def effective_sample_size(weight_sum: float, weight_square_sum: float, count: int) -> float:
    """Share of the samples that would give the same variance if they were weighted equally (Kish): (Σw)² / (n Σw²).

    Args:
        weight_sum: Σw over all ranks and micro-batches.
        weight_square_sum: Σw².
        count: n, the number of weights.

    Returns:
        1 for equal weights, 1/n if one weight dominates, 0 if all weights are 0 or there are none.
    """
    if count == 0 or weight_square_sum == 0.0:
        return 0.0
    return weight_sum**2 / (count * weight_square_sum)


@torch.no_grad()
def off_policy_mask(
    logps: torch.Tensor,
    behaviour_logps: torch.Tensor,
    advantages: torch.Tensor,
    segments: Segments,
    threshold: float,
) -> torch.Tensor:
    """Drop completions with a negative advantage that became unlikely (DeepSeek-V3.2, arXiv 2512.02556).

    Args:
        logps: (N,) log-probs under the policy.
        behaviour_logps: (N,) log-probs under the policy that sampled.
        advantages: (N,) advantage of each token's completion.
        segments: the completions.
        threshold: nats per token. A completion with a negative advantage is dropped if its mean of behaviour − policy
            log-prob exceeds this.

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
        (N,) bool, True where the entropy reaches the (1 − share) quantile, interpolated linearly. All True for a
        share of 1.
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


def k1(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) log ratio policy / reference: unbiased, of either sign, with high variance."""
    return logps - ref_logps


def k2(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) half the squared log ratio: never negative, biased, with low variance."""
    return 0.5 * (logps - ref_logps).square()


def k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """(N,) ratio − 1 − log ratio, for the ratio reference / policy: unbiased and never negative."""
    return _ExpMinusLinear.apply(ref_logps - logps)


class _ExpMinusLinear(torch.autograd.Function):
    """exp(d) − 1 − d, and its derivative exp(d) − 1.

    PyTorch would compute the derivative as a difference of numbers near 1. Where policy and reference are close, only
    rounding would be left of it.
    """

    @staticmethod
    def forward(ctx: Any, difference: torch.Tensor) -> torch.Tensor:
        slope = torch.expm1(difference)
        ctx.save_for_backward(slope)
        return slope - difference

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_result: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return of_result * slope
