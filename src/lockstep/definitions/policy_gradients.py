"""The derivatives of every loss with respect to each token's log-prob, by hand from the papers' formulas.

All functions take float64 arrays of the N tokens of one completion. The gradients that the loss gives are compared
with these derivatives. Some values are so near to a bound that rounding decides on which side they are. Their tokens
are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
# If the relative distance from a bound is smaller than this, the float32 value may be on either side.
NEAR = 1e-5


@dataclass(frozen=True, slots=True)
class Derivative:
    """(N,) derivatives, and (N,) bool whether the value of a token is near a bound."""

    values: Array
    near: Array


def _is_near(values: Array, bounds: tuple[float | None, ...]) -> Array:
    found = np.zeros(values.shape, bool)
    for bound in bounds:
        if bound is not None:
            found |= np.abs(values - bound) <= NEAR * max(abs(bound), 1e-3)
    return found


def clipped(
    ratios: Array, advantages: Array, low: float, high: float, delta: float | None = None
) -> Derivative:
    """Derivative of −min(r A, clip(r, 1 − low, 1 + high) A) with respect to the ratio r (arXiv 1707.06347).

    With `delta`, the first r is replaced by min(r, delta).
    """
    largest = np.inf if delta is None else delta
    bounded, inside = np.minimum(ratios, largest), np.clip(ratios, 1 - low, 1 + high)
    first = bounded * advantages <= inside * advantages
    has_gradient = np.where(first, ratios <= largest, (ratios >= 1 - low) & (ratios <= 1 + high))
    return Derivative(-advantages * has_gradient, _is_near(ratios, (1 - low, 1 + high, delta)))


def sapo(ratios: Array, advantages: Array, positive: float, negative: float) -> Array:
    """Derivative of −A σ(τ (r − 1)) 4 / τ with respect to the ratio r (arXiv 2511.20347).

    `positive` and `negative` are τ for tokens with positive and with other advantages.
    """
    tau = np.where(advantages > 0, positive, negative)
    gate = 1 / (1 + np.exp(-tau * (ratios - 1)))
    return -4 * advantages * gate * (1 - gate)


def vespo_weight(
    log_ratios: Array, corrections: Array | None, whole: bool, power: float, rate: float
) -> float:
    """φ(w) = w^k e^(λ (1 − w)) of a completion's importance weight w (arXiv 2602.10693), without gradient.

    Args:
        corrections: (N,) importance weights trainer / engine, which are factors of w.
        whole: whether each of the `corrections` is the weight of the whole completion, instead of one token's.
        power, rate: k and λ.
    """
    lowest, highest = np.log(1e-8), 20.0
    total = float(np.clip(log_ratios, -highest, highest).sum())
    if corrections is not None:
        with np.errstate(divide="ignore"):
            logs = np.clip(np.log(corrections), lowest, highest)
        total += float(logs.mean() if whole else logs.sum())
    log_weight = float(np.clip(total, lowest, highest))
    return float(np.exp(power * log_weight - max(rate, 1e-4) * np.expm1(log_weight)))


def corrections(differences: Array, mode: str, low: float | None, high: float | None) -> Derivative:
    """Importance weights trainer / engine from the differences of log-probs, masked or truncated as `mode` says."""
    if mode.startswith("token"):
        ratios = np.exp(differences)
    else:
        total = differences.mean() if mode == "sequence_geometric_mask" else differences.sum()
        ratios = np.full(differences.shape, np.exp(total))
    lowest, highest = -np.inf if low is None else low, np.inf if high is None else high
    near = _is_near(ratios, (low, high))
    if mode.endswith("truncate"):
        return Derivative(np.clip(ratios, lowest, highest), np.zeros_like(near))
    inside = (ratios >= lowest) & (ratios <= highest)
    return Derivative(np.where(inside, 1.0 if mode == "sequence_geometric_mask" else ratios, 0.0), near)


def k3(logps: Array, ref_logps: Array) -> tuple[Array, Array]:
    """The estimator e^d − 1 − d of the KL, with d = ref − policy, and its derivative by the policy's log-prob."""
    distance = ref_logps - logps
    return np.expm1(distance) - distance, -np.expm1(distance)


def preference(margin: float, beta: float, kind: str) -> float:
    """Derivative of DPO's loss (arXiv 2305.18290) or IPO's (arXiv 2310.12036) by the chosen completion's log-prob."""
    if kind == "ipo":
        return 2 * (margin - 1 / (2 * beta))
    return float(-beta / (1 + np.exp(beta * margin)))


def value(values: Array, old: Array, returns: Array, clip_range: float) -> Derivative:
    """Derivative of the clipped value loss with respect to the value.

    The loss is half of the larger one of two squared errors: of the value, and of the value clipped to old ± reach.
    """
    clipped_values = np.clip(values, old - clip_range, old + clip_range)
    error, clipped_error = values - returns, clipped_values - returns
    is_inside = np.abs(values - old) <= clip_range
    at_edge = np.abs(np.abs(values - old) - clip_range) <= NEAR
    near = at_edge | (np.abs(error**2 - clipped_error**2) <= NEAR * error**2) & ~is_inside
    return Derivative(np.where(error**2 >= clipped_error**2, error, clipped_error * is_inside), near)
