"""Policy losses with importance ratios against the policy at sampling time, and how their variants weigh tokens.

Everything is per token on flat (N,) tensors, so that a batch may hold its completions in any order and packing. Weights
are fixed for a whole optimizer step before its first token is scored; a step's loss is the sum over its tokens of
`weight × token_loss`, whatever micro-batches they are split into. `grpo`, `dr_grpo`, `dapo`, `bnpo` and `luspo` weigh
`clipped_policy_loss`; `cispo`, `sapo` and `vespo` have their own (`sequence_loss.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.algorithms.segments import Segments

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
ImportanceLevel = Literal["token", "sequence"]


def token_weights(lengths: torch.Tensor, loss_type: LossType, max_completion_length: int) -> torch.Tensor:
    """Weight of each token of every completion of one optimizer step.

    Args:
        lengths: (B,) completion lengths of the whole step, over all ranks and micro-batches; 0 for a masked completion, which
            keeps its place among the B.
        loss_type:
            `grpo`, `sapo`: mean over a completion's tokens, then over completions (arXiv 2402.03300);
            `dr_grpo`: sum over tokens, divided by B × the length limit (arXiv 2503.20783);
            `dapo`, `cispo`, `vespo`: mean over all tokens of the step (arXiv 2503.14476);
            `bnpo`: mean over all tokens of the batch, which here is the whole step, so equal to `dapo`. (Per micro-batch, as
            elsewhere, the result depends on how a step is split: TRL #7206.)
            `luspo`: sum over a completion's tokens, mean over completions (arXiv 2602.05261).
        max_completion_length: the length limit, in tokens.

    Returns:
        (B,) weight of one token of each completion; the weights of a step do not depend on its split.
    """
    if loss_type in ("grpo", "sapo"):
        return 1.0 / (lengths.clamp(min=1) * len(lengths))
    if loss_type == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (len(lengths) * max_completion_length), dtype=torch.float32)
    if loss_type == "luspo":
        return torch.full_like(lengths, 1.0 / len(lengths), dtype=torch.float32)
    return torch.full_like(lengths, 1.0, dtype=torch.float32) / lengths.sum().clamp(min=1)


def prompt_weights(lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Weight of each token where the step is the mean over its prompts, and a prompt the mean over its completions' tokens.

    (ScaleRL, arXiv 2510.13786.) A prompt counts no more for being answered at length.

    Args:
        lengths: (B,) completion lengths of the whole step, 0 for a masked completion.
        groups: (B,) which prompt each completes.

    Returns:
        (B,) weight of one token of each completion. A prompt whose completions are all masked keeps its place in the mean.
    """
    prompts, places = groups.unique(return_inverse=True)
    tokens = torch.zeros(len(prompts)).index_add(0, places, lengths.float())
    return 1.0 / (tokens.clamp(min=1.0)[places] * len(prompts))


def importance_ratios(
    logps: torch.Tensor, old_logps: torch.Tensor, segments: Segments, level: ImportanceLevel
) -> torch.Tensor:
    """Ratio of the policy to the one that the step is taken from.

    Args:
        logps: (N,) log-probs under the policy, with gradient.
        old_logps: (N,) log-probs under the policy that the ratio is taken against, without gradient.
        segments: the completions.
        level: `token` for each token's own ratio, `sequence` for the geometric mean of a completion's at each of its
            tokens (GSPO, arXiv 2507.18071).

    Returns:
        (N,) ratios, differentiable in `logps`.
    """
    log_ratios = logps - old_logps
    if level == "sequence":
        log_ratios = segments.spread(segments.means(log_ratios))
    return log_ratios.exp()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results, each (N,).

    Attributes:
        loss: the quantity to minimise, before weighting.
        low_clipped: the ratio was below the trust region and the advantage negative.
        high_clipped: the ratio was above it and the advantage positive.
    """

    loss: torch.Tensor
    low_clipped: torch.Tensor
    high_clipped: torch.Tensor


def clipped_policy_loss(
    ratios: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> TokenLoss:
    """PPO's clipped objective (arXiv 1707.06347, equation 7). What is clipped has no gradient.

    Args:
        ratios: (N,) importance ratios, with gradient.
        advantages: (N,) advantage of each token's completion.
        epsilon: lower clip, the ratio's floor is 1 − epsilon.
        epsilon_high: upper clip, the ratio's ceiling is 1 + epsilon_high.
        delta: ceiling of the ratio where the advantage is negative, which is otherwise unbounded (INTELLECT-2, arXiv
            2505.07291); above 1 + epsilon_high, or the upper clip is never reached. It counts as no clip.
    """
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratios if delta is None else ratios.clamp(max=delta)
    loss = -torch.minimum(bounded * advantages, clipped * advantages)
    low = (bounded < 1 - epsilon) & (advantages < 0)
    high = (bounded > 1 + epsilon_high) & (advantages > 0)
    return TokenLoss(loss, low, high)


def cispo_loss(ratios: torch.Tensor, logps: torch.Tensor, advantages: torch.Tensor, epsilon_high: float) -> TokenLoss:
    """Policy gradient under a bounded importance weight: every token keeps a gradient (CISPO, arXiv 2506.13585).

    Args:
        ratios: (N,) importance ratios; they weigh, and pass no gradient.
        logps: (N,) log-probs under the policy, with gradient.
        advantages: (N,) advantage of each token's completion.
        epsilon_high: ceiling of the ratio itself, not its distance from 1 (ScaleRL, arXiv 2510.13786, uses 5).

    Returns:
        `high_clipped` marks the ratios beyond the ceiling with a positive advantage; nothing is clipped below.
    """
    ratios = ratios.detach()
    loss = -ratios.clamp(max=epsilon_high) * advantages * logps
    high = (ratios > epsilon_high) & (advantages > 0)
    return TokenLoss(loss, torch.zeros_like(high), high)


def sapo_loss(
    ratios: torch.Tensor, advantages: torch.Tensor, temperature_pos: float, temperature_neg: float
) -> TokenLoss:
    """A sigmoid around ratio 1 in place of the clip: the gradient fades with distance (SAPO, arXiv 2511.20347).

    Args:
        ratios: (N,) importance ratios, with gradient.
        advantages: (N,) advantage of each token's completion.
        temperature_pos: steepness where the advantage is positive, above 0.
        temperature_neg: steepness elsewhere, above 0.

    Returns:
        Nothing is clipped. At ratio 1 the gradient is that of ratio × advantage.
    """
    temperatures = torch.where(advantages > 0, temperature_pos, temperature_neg).to(ratios.dtype)
    gates = torch.sigmoid(temperatures * (ratios - 1)) * (4 / temperatures)
    nothing = torch.zeros_like(ratios, dtype=torch.bool)
    return TokenLoss(-gates * advantages, nothing, nothing)
