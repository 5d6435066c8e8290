"""Importance corrections for the parity gap between engine and trainer, after the gap was measured and accepted."""

from __future__ import annotations

import math
from typing import Literal

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

    The engine samples a token, and the trainer differentiates its log-prob. The weight corrects the difference in their numerics.

    Args:
        policy_logps: (N,) the trainer's log-probs under the weight version that sampled.
        behaviour_logps: (N,) the engine's log-probs.
        segments: the completions.
        mode:
            `token_truncate`: each token's ratio, clamped to the bounds (TIS);
            `token_mask`: each token's ratio, 0 outside the bounds (with both bounds set: IcePop);
            `sequence_truncate`, `sequence_mask`: the same, with the product of a completion's ratios at each of its tokens (the
            product vanishes or explodes with length: TRL #5814);
            `sequence_geometric_mask`: 1 for every token of a completion whose geometric mean ratio lies within the bounds,
            otherwise 0.
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
