"""VESPO's policy loss: the importance weight of a whole completion, with a soft bound."""

from __future__ import annotations

import math

import torch

from lockstep.algorithms.policy_loss import ImportanceLevel, TokenLoss
from lockstep.algorithms.segments import Segments

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
    """Policy gradient weighted by φ(w) = w^k e^(λ(1 − w)) of a completion's importance weight w (VESPO, arXiv 2602.10693).

    Args:
        logps: (N,) log-probs under the policy, with gradient.
        old_logps: (N,) log-probs under the policy at sampling time.
        advantages: (N,) advantage of each token's completion. Its sign selects k and λ.
        segments: the completions.
        correction: (N,) weights of `importance_weights`, which are a factor of w; None: no correction.
        k_pos, lambda_pos: k and λ where the advantage is not negative.
        k_neg, lambda_neg: k and λ where the advantage is negative.
        correction_level: `token`: each token has its own correction, and w contains their product. `sequence`: all tokens of a
            completion have the same correction, and w contains it once.

    Returns:
        The loss, without any clip, and (B,) φ of each completion. φ is 1 at w = 1 and for a completion without tokens.
    """
    weights = _gamma_weights(
        _log_weights(logps.detach(), old_logps, segments, correction, correction_level),
        segments.means(advantages) >= 0,
        (k_pos, lambda_pos),
        (k_neg, lambda_neg),
    )
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
