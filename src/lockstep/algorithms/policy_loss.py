"""The clipped policy loss of GRPO and how its variants weigh tokens.

Everything is per token on flat (N,) tensors, so that a batch may hold its completions in any order and packing. Weights
are fixed for a whole optimizer step before its first token is scored; a step's loss is the sum over its tokens of
`weight × token_loss`, whatever micro-batches they are split into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo"]


def token_weights(lengths: torch.Tensor, loss_type: LossType, max_completion_length: int) -> torch.Tensor:
    """Weight of each token of every completion of one optimizer step.

    Args:
        lengths: (B,) completion lengths of the whole step, over all ranks and micro-batches; 0 for a masked completion.
        loss_type:
            `grpo`: mean over a completion's tokens, then over completions (arXiv 2402.03300);
            `dr_grpo`: sum over tokens, divided by B × the length limit (arXiv 2503.20783);
            `dapo`: mean over all tokens of the step (arXiv 2503.14476);
            `bnpo`: mean over all tokens of the batch, which here is the whole step, so equal to `dapo`. (Per micro-batch, as
            elsewhere, the result depends on how a step is split: TRL #7206.)

    Returns:
        (B,) weight of one token of each completion; the weights of a step do not depend on its split.
    """
    if loss_type == "grpo":
        return 1.0 / (lengths.clamp(min=1) * len(lengths))
    if loss_type == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (len(lengths) * max_completion_length), dtype=torch.float32)
    return torch.full_like(lengths, 1.0, dtype=torch.float32) / lengths.sum().clamp(min=1)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results, each (N,).

    Attributes:
        loss: the quantity to minimise, before weighting.
        low_clipped: the ratio was below the trust region and the advantage negative: no gradient.
        high_clipped: the ratio was above it and the advantage positive: no gradient.
    """

    loss: torch.Tensor
    low_clipped: torch.Tensor
    high_clipped: torch.Tensor


def clipped_policy_loss(
    logps: torch.Tensor, old_logps: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float
) -> TokenLoss:
    """PPO's clipped objective, one ratio a token (arXiv 1707.06347, equation 7).

    Args:
        logps: (N,) log-probs under the policy, with gradient.
        old_logps: (N,) log-probs under the policy that the ratio is taken against, without gradient.
        advantages: (N,) advantage of each token's completion.
        epsilon: lower clip, the ratio's floor is 1 − epsilon.
        epsilon_high: upper clip, the ratio's ceiling is 1 + epsilon_high.
    """
    ratio = torch.exp(logps - old_logps)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        low = (ratio < 1 - epsilon) & (advantages < 0)
        high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return TokenLoss(loss, low, high)
