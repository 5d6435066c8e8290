"""Proof of the loss: what flows back to each token's log-prob is the derivative that the method's formula gives.

`training/step/loss_gradient.py` takes the gradient of a pack's log-probs after its backward, so that a factor anywhere between the
loss and the model is seen. The formulas stand in `definitions/policy_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.definitions import policy_gradients as define
from lockstep.definitions.policy_gradients import Array, Slope
from lockstep.errors import ProofError

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N tokens of one completion, as float64 arrays of (N,).

    Attributes:
        weight: of each token in the loss.
        kept: whether the policy learns from each token.
        pair: names the two completions of a pair, for Online DPO.
    """

    name: str
    weight: float
    logps: Array
    old_logps: Array
    behaviour: Array
    advantages: Array
    kept: Array
    ref_logps: Array | None = None
    values: Array | None = None
    old_values: Array | None = None
    returns: Array | None = None
    pair: str | None = None


def by_logps(method: str, completions: Sequence[Tokens], settings: Any, beta: float) -> list[Slope]:
    """(N,) derivatives of the loss of each completion by its log-probs.

    Args:
        method: as in `AdvantageProof`.
        beta: weight of the KL in the loss, or of the reference model in a preference; 0: none.
    """
    if method == "online_dpo":
        return _pairs(completions, settings, beta)
    of_one = {"grpo": _grpo, "rloo": _rloo, "reinforce++": _tokens, "ppo": _tokens}[method]
    return [of_one(c, settings, beta) for c in completions]


def by_values(completions: Sequence[Tokens], settings: Any) -> list[Slope]:
    """(N,) derivatives by the critic's values."""
    found = []
    for c in completions:
        assert c.values is not None
        assert c.old_values is not None
        assert c.returns is not None
        slope = define.value(c.values, c.old_values, c.returns, settings.cliprange_value)
        found.append(Slope(settings.vf_coef * c.weight * slope.values, slope.near))
    return found


def check(what: str, names: Sequence[str], due: Sequence[Slope], found: Sequence[Array]) -> int:
    """Compare derivatives.

    Returns:
        The number of tokens that were compared.

    Raises:
        ProofError: one differs by more than rounding.
    """
    scale = max((float(np.abs(d.values).max()) for d in due if len(d.values)), default=0.0)
    compared = 0
    for name, slope, own in zip(names, due, found, strict=True):
        off = np.abs(own - slope.values)
        wrong = ~(off <= 2e-4 * np.abs(slope.values) + 2e-5 * scale + 1e-12) & ~slope.near
        compared += int((~slope.near).sum())
        if wrong.any():
            at = int(np.where(wrong, np.nan_to_num(off, nan=np.inf), -1.0).argmax())
            raise ProofError(
                "loss_gradient",
                f"the gradient of the {what} of token {at} of {name} is {own[at]:.6g}; the method's formula gives "
                f"{slope.values[at]:.6g} ({int(wrong.sum())} of {len(own)} tokens differ)",
                "the loss was scaled, divided twice, masked or clipped in another way than the method's formula says",
                "let nothing change the loss or its backward; for a loss of your own, set objective_class to a class of your own",
            )
    return compared


def _correction(c: Tokens, settings: Any) -> Slope:
    if not settings.vllm_importance_sampling_correction:
        return Slope(np.ones(len(c.logps)), np.zeros(len(c.logps), bool))
    return define.corrections(
        c.old_logps - c.behaviour,
        settings.vllm_importance_sampling_mode,
        settings.vllm_importance_sampling_clip_min,
        settings.vllm_importance_sampling_clip_max,
    )


def _tokens(c: Tokens, settings: Any, beta: float) -> Slope:
    """PPO and REINFORCE++: a clipped ratio per token; with `beta`, k2 of the KL."""
    ratios = np.exp(c.logps - c.old_logps)
    slope, correction = (
        define.clipped(ratios, c.advantages, settings.epsilon, settings.clip_high),
        _correction(c, settings),
    )
    total = slope.values * ratios * correction.values
    if beta:
        assert c.ref_logps is not None
        total = total + beta * (c.logps - c.ref_logps)
    return Slope(c.weight * total, slope.near | correction.near)


def _rloo(c: Tokens, settings: Any, beta: float) -> Slope:
    """One ratio per completion; the correction weights each token's part of its gradient."""
    ratio = np.exp((c.logps - c.old_logps).sum(keepdims=True))
    slope = define.clipped(ratio, c.advantages.mean(keepdims=True), settings.epsilon, settings.clip_high)
    correction = _correction(c, settings)
    return Slope(c.weight * slope.values * ratio * correction.values, slope.near | correction.near)


def _grpo(c: Tokens, settings: Any, beta: float) -> Slope:
    whole = settings.importance_sampling_level == "sequence"
    log_ratios = c.logps - c.old_logps
    ratios = np.exp(np.full_like(log_ratios, log_ratios.mean()) if whole else log_ratios)
    near, correction = np.zeros(len(ratios), bool), _correction(c, settings)
    factor = c.kept.astype(np.float64)
    if settings.off_policy_mask_threshold is not None:
        drift = float((c.behaviour - c.logps).mean())
        factor = factor * ((c.advantages >= 0) | (drift <= settings.off_policy_mask_threshold))
        near = near | (abs(drift - settings.off_policy_mask_threshold) < define.NEAR)
    if settings.loss_type != "vespo":
        factor, near = factor * correction.values, near | correction.near
    # Derivatives by the ratio, and those by the log-prob itself, where the ratio has no gradient.
    by_ratio, by_logp = np.zeros(len(ratios)), np.zeros(len(ratios))
    if settings.loss_type in _CLIPPED:
        slope = define.clipped(ratios, c.advantages, settings.epsilon, settings.clip_high, settings.delta)
        by_ratio, near = slope.values * factor, near | slope.near
    elif settings.loss_type == "cispo":
        by_logp = -np.minimum(ratios, settings.clip_high) * c.advantages * factor
    elif settings.loss_type == "sapo":
        slopes = define.sapo(ratios, c.advantages, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
        by_ratio = slopes * factor
    else:
        up = c.advantages.mean() >= 0
        phi = define.vespo_weight(
            log_ratios,
            correction.values if settings.vllm_importance_sampling_correction else None,
            settings.vllm_importance_sampling_mode.startswith("sequence"),
            settings.vespo_k_pos if up else settings.vespo_k_neg,
            settings.vespo_lambda_pos if up else settings.vespo_lambda_neg,
        )
        by_logp, near = -phi * c.advantages * factor, near | correction.near.any()
    if beta:
        assert c.ref_logps is not None
        divergence, slope_of_kl = define.k3(c.logps, c.ref_logps)
        if settings.use_bias_correction_kl:
            by_ratio, by_logp = by_ratio + beta * divergence, by_logp + beta * slope_of_kl * ratios
        else:
            by_logp = by_logp + beta * slope_of_kl
    through = by_ratio * ratios
    if whole:
        # All tokens share the ratio, the exponential of the mean.
        through = np.full_like(through, through.mean())
        near = np.full_like(near, near.any())
    return Slope(c.weight * (through + by_logp), near)


def _pairs(completions: Sequence[Tokens], settings: Any, beta: float) -> list[Slope]:
    pairs: dict[str, dict[bool, Tokens]] = {}
    for c in completions:
        assert c.pair is not None
        pairs.setdefault(c.pair, {})[bool(c.advantages[0] > 0)] = c

    def gain(c: Tokens) -> float:
        assert c.ref_logps is not None
        return float(c.logps.sum() - c.ref_logps.sum())

    made = {}
    for pair in pairs.values():
        chosen, rejected = pair[True], pair[False]
        slope = chosen.weight * define.preference(gain(chosen) - gain(rejected), beta, settings.loss_type)
        made[chosen.name], made[rejected.name] = slope, -slope
    return [Slope(np.full(len(c.logps), made[c.name]), np.zeros(len(c.logps), bool)) for c in completions]
