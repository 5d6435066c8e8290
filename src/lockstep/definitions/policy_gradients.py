"""The derivatives of every policy loss with respect to each token's log-prob, derived by hand from the papers' formulas.

All functions take float64 arrays of the N tokens of one completion. `parity/step/gradient.py` compares the gradients that the loss
gives with these derivatives. Some values are so near to a bound that rounding decides on which side they are. Their tokens are not
compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
# If the relative distance from a bound is smaller than this, the float32 value may be on either side.
NEAR = 1e-5


@dataclass(frozen=True, slots=True)
class Slope:
    """(N,) derivatives, and (N,) bool whether the value of a token is near a bound."""

    values: Array
    near: Array


def _close(values: Array, bounds: tuple[float | None, ...]) -> Array:
    found = np.zeros(values.shape, bool)
    for bound in bounds:
        if bound is not None:
            found |= np.abs(values - bound) <= NEAR * max(abs(bound), 1e-3)
    return found


def clipped(ratios: Array, advantages: Array, low: float, high: float, delta: float | None = None) -> Slope:
    """Derivative of −min(r A, clip(r, 1 − low, 1 + high) A) with respect to the ratio r (arXiv 1707.06347).

    With `delta`, the first r is replaced by min(r, delta).
    """
    top = np.inf if delta is None else delta
    bounded, inside = np.minimum(ratios, top), np.clip(ratios, 1 - low, 1 + high)
    first = bounded * advantages <= inside * advantages
    moves = np.where(first, ratios <= top, (ratios >= 1 - low) & (ratios <= 1 + high))
    return Slope(-advantages * moves, _close(ratios, (1 - low, 1 + high, delta)))


def sapo(ratios: Array, advantages: Array, positive: float, negative: float) -> Array:
    """Derivative of −A σ(τ (r − 1)) 4 / τ with respect to the ratio r (arXiv 2511.20347).

    `positive` and `negative` are τ for tokens with positive and with other advantages.
    """
    sharp = np.where(advantages > 0, positive, negative)
    gate = 1 / (1 + np.exp(-sharp * (ratios - 1)))
    return -4 * advantages * gate * (1 - gate)


def vespo_weight(log_ratios: Array, corrections: Array | None, whole: bool, power: float, rate: float) -> float:
    """φ(w) = w^k e^(λ (1 − w)) of a completion's importance weight w (arXiv 2602.10693), without gradient.

    Args:
        corrections: (N,) importance weights trainer / engine, which are factors of w.
        whole: whether each of the `corrections` is the weight of the whole completion, instead of one token's.
        power, rate: k and λ.
    """
    least, most = np.log(1e-8), 20.0
    total = float(np.clip(log_ratios, -most, most).sum())
    if corrections is not None:
        with np.errstate(divide="ignore"):
            logs = np.clip(np.log(corrections), least, most)
        total += float(logs.mean() if whole else logs.sum())
    log_weight = float(np.clip(total, least, most))
    return float(np.exp(power * log_weight - max(rate, 1e-4) * np.expm1(log_weight)))


def corrections(differences: Array, mode: str, low: float | None, high: float | None) -> Slope:
    """Importance weights trainer / engine from the differences of log-probs, masked or truncated as `mode` says."""
    if mode.startswith("token"):
        ratios = np.exp(differences)
    else:
        total = differences.mean() if mode == "sequence_geometric_mask" else differences.sum()
        ratios = np.full(differences.shape, np.exp(total))
    least, most = -np.inf if low is None else low, np.inf if high is None else high
    near = _close(ratios, (low, high))
    if mode.endswith("truncate"):
        return Slope(np.clip(ratios, least, most), np.zeros_like(near))
    inside = (ratios >= least) & (ratios <= most)
    return Slope(np.where(inside, 1.0 if mode == "sequence_geometric_mask" else ratios, 0.0), near)


def k3(logps: Array, ref_logps: Array) -> tuple[Array, Array]:
    """The estimator e^d − 1 − d of the KL, with d = ref − policy, and its derivative with respect to the policy's log-prob."""
    distance = ref_logps - logps
    return np.expm1(distance) - distance, -np.expm1(distance)


def preference(margin: float, beta: float, kind: str) -> float:
    """Derivative of DPO's loss (arXiv 2305.18290) or IPO's (arXiv 2310.12036) with respect to the chosen completion's log-prob."""
    if kind == "ipo":
        return 2 * (margin - 1 / (2 * beta))
    return float(-beta / (1 + np.exp(beta * margin)))


def value(values: Array, old: Array, returns: Array, reach: float) -> Slope:
    """Derivative of the clipped value loss with respect to the value.

    The loss is half of the larger one of two squared errors: of the value, and of the value clipped to old ± reach.
    """
    inside = np.clip(values, old - reach, old + reach)
    plain, held = values - returns, inside - returns
    moves = np.abs(values - old) <= reach
    near = (np.abs(np.abs(values - old) - reach) <= NEAR) | (np.abs(plain**2 - held**2) <= NEAR * plain**2) & ~moves
    return Slope(np.where(plain**2 >= held**2, plain, held * moves), near)
