"""Losses on pairs of completions of one prompt, of which one was preferred."""

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
    """Loss of each of P pairs, from log-probs summed over a completion.

    Args:
        chosen: (P,) log-prob of the preferred completion under the policy, with gradient.
        rejected: (P,) that of the other.
        ref_chosen: (P,) log-prob of the preferred completion under the reference.
        ref_rejected: (P,) that of the other.
        beta: strength of the tie to the reference; the `ipo` margin aims at 1 / (2 beta) nats.
        loss_type: `sigmoid` (DPO, arXiv 2305.18290, equation 7) or `ipo` (arXiv 2310.12036, equation 17).

    Returns:
        (P,) losses, not averaged.
    """
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    return -F.logsigmoid(beta * margin)


def choose(rewards_first: torch.Tensor, rewards_second: torch.Tensor) -> torch.Tensor:
    """Which completion of each pair is preferred.

    Args:
        rewards_first: (P,) rewards of the first completions, NaN where none was given.
        rewards_second: (P,) those of the second.

    Returns:
        (P,) int64: 0 for the first, 1 for the second, −1 where neither is: a tie, or a reward is missing.
    """
    nobody = torch.full_like(rewards_first, -1, dtype=torch.int64)
    # A comparison with NaN is false, either way.
    return nobody.masked_fill(rewards_first > rewards_second, 0).masked_fill(rewards_second > rewards_first, 1)
