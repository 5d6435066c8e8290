"""Losses on pairs of completions of one prompt, of which one is preferred."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

PreferenceLossType = Literal["sigmoid", "ipo"]


def preference_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
    loss_type: PreferenceLossType,
) -> torch.Tensor:
    """Loss of each of P pairs, computed from log-probs that are summed over a completion.

    Args:
        chosen: (P,) log-prob of the preferred completion under the policy, with gradient.
        rejected: (P,) log-prob of the other completion under the policy, with gradient.
        ref_chosen: (P,) log-prob of the preferred completion under the reference model.
        ref_rejected: (P,) log-prob of the other completion under the reference model.
        beta: strength of the pull towards the reference model; the target of the `ipo` margin is 1 / (2 beta) nats.
        loss_type: `sigmoid` (DPO, arXiv 2305.18290, equation 7) or `ipo` (arXiv 2310.12036, equation 17).

    Returns:
        (P,) losses, not averaged.
    """
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    return -F.logsigmoid(beta * margin)


def choose(rewards_first: torch.Tensor, rewards_second: torch.Tensor) -> torch.Tensor:
    """The preferred completion of each pair.

    Args:
        rewards_first: (P,) rewards of the first completions, NaN if there is none.
        rewards_second: (P,) rewards of the second completions.

    Returns:
        (P,) int64: 0 for the first, 1 for the second, −1 if neither is preferred: a tie, or a missing reward.
    """
    nobody = torch.full_like(rewards_first, -1, dtype=torch.int64)
    # Comparisons with NaN are false in both directions.
    return nobody.masked_fill(rewards_first > rewards_second, 0).masked_fill(rewards_second > rewards_first, 1)
