"""The losses of the methods, as functions of log-probs: per token, per completion, and per pair.

Policy losses take importance ratios against the policy at sampling time. Everything is per token on flat (N,) tensors,
so that a batch may hold its completions in any order and packing. The weights are fixed for a whole optimizer step
before its first token is scored. The loss of a step is the sum of `weight × token_loss` over its tokens, for any split
into micro-batches. `grpo`, `dr_grpo`, `dapo`, `bnpo` and `luspo` weight `clipped_policy_loss`; `cispo`, `sapo` and
`vespo` have their own losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from lockstep.algorithms.segments import Segments

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
ImportanceLevel = Literal["token", "sequence"]


def token_weights(lengths: torch.Tensor, loss_type: LossType, max_completion_length: int) -> torch.Tensor:
    """Weight of each token of every completion of one optimizer step.

    Args:
        lengths: (B,) completion lengths of the whole step, over all ranks and micro-batches; 0 for a masked
            completion, which still counts among the B.
        loss_type:
            `grpo`, `sapo`: mean over a completion's tokens, then over completions (arXiv 2402.03300);
            `dr_grpo`: sum over tokens, divided by B × the length limit (arXiv 2503.20783);
            `dapo`, `cispo`, `vespo`: mean over all tokens of the step (arXiv 2503.14476);
            `bnpo`: mean over all tokens of the batch, which here is the whole step, so that it equals `dapo`. (Other
            programs use the micro-batch, and then the result depends on how a step is split: TRL #7206.)
            `luspo`: sum over a completion's tokens, mean over completions (arXiv 2602.05261).
        max_completion_length: the length limit, in tokens.

    Returns:
        (B,) weight of one token of each completion. The weights do not depend on how the step is split.
    """
    if loss_type in ("grpo", "sapo"):
        return 1.0 / (lengths.clamp(min=1) * len(lengths))
    if loss_type == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (len(lengths) * max_completion_length), dtype=torch.float32)
    if loss_type == "luspo":
        return torch.full_like(lengths, 1.0 / len(lengths), dtype=torch.float32)
    return torch.full_like(lengths, 1.0, dtype=torch.float32) / lengths.sum().clamp(min=1)


def prompt_weights(lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Weight of each token if the loss is a mean over prompts of the mean over each prompt's completion tokens.

    (ScaleRL, arXiv 2510.13786.) So a prompt with long completions counts no more than another.

    Args:
        lengths: (B,) completion lengths of the whole step; 0 for a masked completion.
        groups: (B,) index of each completion's prompt.

    Returns:
        (B,) weight of one token of each completion. A prompt whose completions are all masked is still counted by the
        mean.
    """
    prompts, places = groups.unique(return_inverse=True)
    tokens = torch.zeros(len(prompts)).index_add(0, places, lengths.float())
    return 1.0 / (tokens.clamp(min=1.0)[places] * len(prompts))


def importance_ratios(
    logps: torch.Tensor, old_logps: torch.Tensor, segments: Segments, level: ImportanceLevel
) -> torch.Tensor:
    """Ratio of the policy to the old policy, from which the step starts.

    Args:
        logps: (N,) log-probs under the policy, with gradient.
        old_logps: (N,) log-probs under the old policy, without gradient.
        segments: the completions.
        level: `token`: each token's own ratio. `sequence`: at each token, the geometric mean of its completion's
            ratios (GSPO, arXiv 2507.18071).

    Returns:
        (N,) ratios, differentiable in `logps`.
    """
    log_ratios = logps - old_logps
    if level == "sequence":
        log_ratios = segments.spread(segments.means(log_ratios))
    return log_ratios.exp()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Results per token, each (N,).

    Attributes:
        loss: the quantity to minimise, before weighting.
        low_clipped: whether the ratio was below the trust region and the advantage negative.
        high_clipped: whether the ratio was above the trust region and the advantage positive.
    """

    loss: torch.Tensor
    low_clipped: torch.Tensor
    high_clipped: torch.Tensor


def clipped_policy_loss(
    ratios: torch.Tensor,
    advantages: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
) -> TokenLoss:
    """PPO's clipped objective (arXiv 1707.06347, equation 7). Clipped tokens have no gradient.

    Args:
        ratios: (N,) importance ratios, with gradient.
        advantages: (N,) advantage of each token's completion.
        epsilon: lower clip: the ratio is at least 1 − epsilon.
        epsilon_high: upper clip: the ratio is at most 1 + epsilon_high.
        delta: upper limit of the ratio where the advantage is negative; without it there is none (INTELLECT-2, arXiv
            2505.07291). It must be above 1 + epsilon_high, or the upper clip is never reached. It does not count as a
            clip.
    """
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratios if delta is None else ratios.clamp(max=delta)
    loss = -torch.minimum(bounded * advantages, clipped * advantages)
    low = (bounded < 1 - epsilon) & (advantages < 0)
    high = (bounded > 1 + epsilon_high) & (advantages > 0)
    return TokenLoss(loss, low, high)


def cispo_loss(
    ratios: torch.Tensor, logps: torch.Tensor, advantages: torch.Tensor, epsilon_high: float
) -> TokenLoss:
    """Policy gradient with a bounded importance weight; every token keeps a gradient (CISPO, arXiv 2506.13585).

    Args:
        ratios: (N,) importance ratios; used as weights, without gradient.
        logps: (N,) log-probs under the policy, with gradient.
        advantages: (N,) advantage of each token's completion.
        epsilon_high: upper limit of the ratio itself, not of its distance from 1 (ScaleRL, arXiv 2510.13786, uses 5).

    Returns:
        `high_clipped` marks ratios above the limit with a positive advantage. There is no lower clip.
    """
    ratios = ratios.detach()
    loss = -ratios.clamp(max=epsilon_high) * advantages * logps
    high = (ratios > epsilon_high) & (advantages > 0)
    return TokenLoss(loss, torch.zeros_like(high), high)


def sapo_loss(
    ratios: torch.Tensor, advantages: torch.Tensor, temperature_pos: float, temperature_neg: float
) -> TokenLoss:
    """A sigmoid around ratio 1 instead of a clip: the gradient fades with the distance from 1 (SAPO, arXiv 2511.20347).

    Args:
        ratios: (N,) importance ratios, with gradient.
        advantages: (N,) advantage of each token's completion.
        temperature_pos: steepness where the advantage is positive; must be above 0.
        temperature_neg: steepness elsewhere; must be above 0.

    Returns:
        No token is marked as clipped. At ratio 1 the gradient is that of ratio × advantage.
    """
    temperatures = torch.where(advantages > 0, temperature_pos, temperature_neg).to(ratios.dtype)
    gates = torch.sigmoid(temperatures * (ratios - 1)) * (4 / temperatures)
    nothing = torch.zeros_like(ratios, dtype=torch.bool)
    return TokenLoss(-gates * advantages, nothing, nothing)


# Bounds of a log weight, as in the paper's code and in TRL.
_LOWEST = math.log(1e-8)
_HIGHEST = 20.0


def vespo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    segments: Segments,
    correction: torch.Tensor | None,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    correction_level: ImportanceLevel = "token",
) -> tuple[TokenLoss, torch.Tensor]:
    """Policy gradient, times φ(w) = w^k e^(λ(1 − w)) of a completion's importance weight (VESPO, arXiv 2602.10693).

    Args:
        logps: (N,) log-probs under the policy, with gradient.
        old_logps: (N,) log-probs under the policy at sampling time.
        advantages: (N,) advantage of each token's completion. Its sign selects k and λ.
        segments: the completions.
        correction: (N,) weights of `importance_weights`, which are a factor of w; None: no correction.
        k_pos, lambda_pos: k and λ where the advantage is not negative.
        k_neg, lambda_neg: k and λ where the advantage is negative.
        correction_level: `token`: each token has its own correction, and w contains their product. `sequence`: all
            tokens of a completion have the same correction, and w contains it once.

    Returns:
        The loss, without any clip, and (B,) φ of each completion. φ is 1 at w = 1 and for a completion without tokens.
    """
    logs = _log_weights(logps.detach(), old_logps, segments, correction, correction_level)
    is_positive = segments.means(advantages) >= 0
    weights = _gamma_weights(logs, is_positive, (k_pos, lambda_pos), (k_neg, lambda_neg))
    nothing = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLoss(-segments.spread(weights) * advantages * logps, nothing, nothing), weights


@torch.no_grad()
def _log_weights(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    segments: Segments,
    correction: torch.Tensor | None,
    correction_level: ImportanceLevel,
) -> torch.Tensor:
    """(B,) log of each completion's importance weight, clamped to the bounds."""
    total = segments.sums((logps - old_logps).clamp(-_HIGHEST, _HIGHEST))
    if correction is not None:
        logs = correction.log().clamp(_LOWEST, _HIGHEST)
        total = total + (segments.means(logs) if correction_level == "sequence" else segments.sums(logs))
    return total.clamp(_LOWEST, _HIGHEST)


def _gamma_weights(
    log_weights: torch.Tensor,
    positive: torch.Tensor,
    shape_pos: tuple[float, float],
    shape_neg: tuple[float, float],
) -> torch.Tensor:
    """(B,) φ of each weight, computed from the log weight."""
    power = torch.where(positive, shape_pos[0], shape_neg[0])
    rate = torch.where(positive, shape_pos[1], shape_neg[1]).clamp(min=1e-4)
    return (power * log_weights - rate * log_weights.expm1()).exp()


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
    found = nobody.masked_fill(rewards_first > rewards_second, 0)
    return found.masked_fill(rewards_second > rewards_first, 1)
