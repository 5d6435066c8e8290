"""Importance corrections for the gap between engine and trainer, applied to a gap that has been measured and passed."""

from __future__ import annotations

import torch


def truncated_token_weights(policy_logps: torch.Tensor, behaviour_logps: torch.Tensor, clip_max: float) -> torch.Tensor:
    """Token-level truncated importance weights min(π_trainer / π_engine, clip_max).

    A token is sampled by the engine and differentiated by the trainer; where their numerics differ the weight makes up for
    it, truncated so that no token dominates.

    Args:
        policy_logps: (N,) the trainer's log-probs at the version that sampled, without gradient.
        behaviour_logps: (N,) the engine's.
        clip_max: upper bound of a weight.

    Returns:
        (N,) weights; all ones where both sides agree exactly.
    """
    return torch.exp(policy_logps - behaviour_logps).clamp(max=clip_max)
