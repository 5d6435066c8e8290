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
from lockstep.definitions.policy_gradients import Array, Derivative
from lockstep.errors import ProofError
from lockstep.tokens.arrays import cut

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N tokens of one completion, as float64 arrays of (N,).

    Attributes:
        weight: of each token in the loss; or (N,), where the tokens are those of several completions.
        kept: whether the policy learns from each token.
        pair: names the two completions of a pair, for Online DPO.
    """

    name: str
    weight: float | Array
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


def by_logps(method: str, completions: Sequence[Tokens], settings: Any, beta: float) -> list[Derivative]:
    """(N,) derivatives of the loss of each completion by its log-probs.

    Args:
        method: as in `AdvantageProof`.
        beta: weight of the KL in the loss, or of the reference model in a preference; 0: none.
    """
    if method == "online_dpo":
        return _pairs(completions, settings, beta)
    of_one = {"grpo": _grpo, "rloo": _rloo, "reinforce++": _tokens, "ppo": _tokens}[method]
    if _of_tokens(method, settings):
        slope, lengths = of_one(_joined(completions), settings, beta), [len(c.logps) for c in completions]
        return [Derivative(*both) for both in zip(cut(slope.values, lengths), cut(slope.near, lengths), strict=True)]
    return [of_one(c, settings, beta) for c in completions]


def _of_tokens(method: str, settings: Any) -> bool:
    """Whether the derivative of a token depends on no other token. Then one call computes those of all completions."""
    corrected = settings.vllm_importance_sampling_correction
    alone = not corrected or settings.vllm_importance_sampling_mode.startswith("token")
    if method == "grpo":
        whole = settings.importance_sampling_level == "sequence" or settings.loss_type == "vespo"
        return alone and not whole and settings.off_policy_mask_threshold is None
    return alone and method in ("reinforce++", "ppo")


def _joined(completions: Sequence[Tokens]) -> Tokens:
    """The tokens of all completions as those of one, each with its own weight."""
    fields = ("logps", "old_logps", "behaviour", "advantages", "kept", "ref_logps")
    columns = {name: [getattr(c, name) for c in completions] for name in fields}
    arrays = {name: np.concatenate(own) for name, own in columns.items() if own[0] is not None}
    weights = np.repeat([float(c.weight) for c in completions], [len(c.logps) for c in completions])
    return Tokens(name="", weight=weights, **arrays)


def by_values(completions: Sequence[Tokens], settings: Any) -> list[Derivative]:
    """(N,) derivatives by the critic's values."""
    found = []
    for c in completions:
        assert c.values is not None
        assert c.old_values is not None
        assert c.returns is not None
        slope = define.value(c.values, c.old_values, c.returns, settings.cliprange_value)
        found.append(Derivative(settings.vf_coef * c.weight * slope.values, slope.near))
    return found


def check(
    what: str, names: Sequence[str], due: Sequence[Derivative], found: Sequence[Array], packs: Sequence[int]
) -> int:
    """Compare derivatives.

    Args:
        names, due, found: one of each per completion.
        packs: number of tokens of each pack. Rounding is judged by the largest derivative of a pack.

    Returns:
        The number of tokens that were compared.

    Raises:
        ProofError: one differs by more than rounding.
    """
    values, near, own = (
        np.concatenate(parts) for parts in ([d.values for d in due], [d.near for d in due], list(found))
    )
    off, sizes = np.abs(own - values), np.abs(values)
    scales = np.repeat([part.max(initial=0.0) for part in cut(sizes, packs)], packs)
    wrong = ~(off <= 2e-4 * sizes + 2e-5 * scales + 1e-12) & ~near
    if wrong.any():
        at = int(np.where(wrong, np.nan_to_num(off, nan=np.inf), -1.0).argmax())
        ends = np.cumsum([len(part) for part in found])
        which = int(np.searchsorted(ends, at, side="right"))
        part = slice(int(ends[which]) - len(found[which]), int(ends[which]))
        raise ProofError(
            "loss_gradient",
            f"the gradient of the {what} of token {at - part.start} of {names[which]} is {own[at]:.6g}; the method's formula gives "
            f"{values[at]:.6g} ({int(wrong[part].sum())} of {len(found[which])} tokens differ)",
            "the loss was scaled, divided twice, masked or clipped in another way than the method's formula says",
            "let nothing change the loss or its backward; for a loss of your own, set objective_class to a class of your own",
        )
    return len(near) - int(np.count_nonzero(near))


def _correction(c: Tokens, settings: Any) -> Derivative:
    if not settings.vllm_importance_sampling_correction:
        return Derivative(np.ones(len(c.logps)), np.zeros(len(c.logps), bool))
    return define.corrections(
        c.old_logps - c.behaviour,
        settings.vllm_importance_sampling_mode,
        settings.vllm_importance_sampling_clip_min,
        settings.vllm_importance_sampling_clip_max,
    )


def _tokens(c: Tokens, settings: Any, beta: float) -> Derivative:
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
    return Derivative(c.weight * total, slope.near | correction.near)


def _rloo(c: Tokens, settings: Any, beta: float) -> Derivative:
    """One ratio per completion; the correction weights each token's part of its gradient."""
    ratio = np.exp((c.logps - c.old_logps).sum(keepdims=True))
    slope = define.clipped(ratio, c.advantages.mean(keepdims=True), settings.epsilon, settings.clip_high)
    correction = _correction(c, settings)
    return Derivative(c.weight * slope.values * ratio * correction.values, slope.near | correction.near)


def _grpo(c: Tokens, settings: Any, beta: float) -> Derivative:
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
    return Derivative(c.weight * (through + by_logp), near)


def _pairs(completions: Sequence[Tokens], settings: Any, beta: float) -> list[Derivative]:
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
    return [Derivative(np.full(len(c.logps), made[c.name]), np.zeros(len(c.logps), bool)) for c in completions]
