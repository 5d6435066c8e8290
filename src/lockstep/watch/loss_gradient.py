"""Proof of the loss: what flows back to each token's log-prob is the derivative that the method's formula gives.

The proof takes the gradient of a pack's log-probs after its backward, so that a factor anywhere between the loss and
the model is seen. The formulas stand in `definitions/policy_gradients.py`.

Proof `loss_gradient`.
Shows: what flows back to the log-prob (and the critic's value) of every token is the derivative that the method's
formula gives, written a second time: clipping, corrections, KL and the size of the loss.
Does not show: what happens behind the log-probs, in the model's own backward (`model_gradient` shows this); the
entropy bonus; tokens within 1e-5 of a bound; objectives of your own.
When: every backward, at the end of its micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.definitions import policy_gradients as define
from lockstep.definitions.policy_gradients import Array, Derivative
from lockstep.errors import ProofError
from lockstep.learn.methods.objective import Objective, TokenBatch
from lockstep.learn.update import as_float64
from lockstep.tokens.arrays import cut
from lockstep.whose_code import is_lockstep

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

    `beta` weighs the KL in the loss, or the reference model in a preference; 0: none.
    """
    if method == "online_dpo":
        return _pairs(completions, settings, beta)
    of_one = {"grpo": _grpo, "rloo": _rloo, "reinforce++": _tokens, "ppo": _tokens}[method]
    if _of_tokens(method, settings):
        slope, lengths = of_one(_joined(completions), settings, beta), [len(c.logps) for c in completions]
        columns = cut(slope.values, lengths), cut(slope.near, lengths)
        return [Derivative(*both) for both in zip(*columns, strict=True)]
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
    """Compare derivatives, one array per completion, and count the tokens that were compared.

    Rounding is judged by the largest derivative of a pack; `packs` has the number of tokens of each.
    """
    columns = [d.values for d in due], [d.near for d in due], list(found)
    values, near, own = map(np.concatenate, columns)
    off, sizes = np.abs(own - values), np.abs(values)
    scales = np.repeat([part.max(initial=0.0) for part in cut(sizes, packs)], packs)
    wrong = ~(off <= 2e-4 * sizes + 2e-5 * scales + 1e-12) & ~near
    if wrong.any():
        at = int(np.where(wrong, np.nan_to_num(off, nan=np.inf), -1.0).argmax())
        ends = np.cumsum([len(part) for part in found])
        which = int(np.searchsorted(ends, at, side="right"))
        own_tokens = slice(int(ends[which]) - len(found[which]), int(ends[which]))
        raise ProofError(
            "loss_gradient",
            f"the gradient of the {what} of token {at - own_tokens.start} of {names[which]} is {own[at]:.6g}; the "
            f"method's formula gives "
            f"{values[at]:.6g} ({int(wrong[own_tokens].sum())} of {len(found[which])} tokens differ)",
            "the loss was scaled, divided twice, masked or clipped in another way than the method's formula says",
            "let nothing change the loss or its backward; for a loss of your own, set objective_class to a "
            "class of your own",
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
    slope = define.clipped(ratios, c.advantages, settings.epsilon, settings.clip_high)
    correction = _correction(c, settings)
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
        temperatures = settings.sapo_temperature_pos, settings.sapo_temperature_neg
        by_ratio = define.sapo(ratios, c.advantages, *temperatures) * factor
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
    return [
        Derivative(np.full(len(c.logps), made[c.name]), np.zeros(len(c.logps), bool)) for c in completions
    ]


class LossGradient:
    """The gradients of the log-probs and values of a micro-batch. Objectives of the user's own are not compared."""

    def __init__(self, objective: Objective[Any]) -> None:
        self._objective = objective
        self._method = objective.definition if is_lockstep(type(objective)) else None
        self._watched: list[tuple[TokenBatch, dict[str, torch.Tensor]]] = []

    def watch(self, batch: TokenBatch) -> None:
        """Keep the gradients of a pack. Call it before the loss of the pack is computed."""
        if self._method is None:
            return
        found: dict[str, torch.Tensor] = {}
        for name, tensor in (("logps", batch.logps), ("values", _values(batch))):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient))
        self._watched.append((batch, found))

    def check(self) -> None:
        """Compare, after the backward of every pack."""
        if self._method is None or not self._watched:
            return
        beta, config = self._beta(), self._objective.config
        # One copy from the device per pack, for everything that is compared.
        packs = [self._columns(batch, found, beta) for batch, found in self._watched]
        hosts = [as_float64(*columns.values()) for columns in packs]
        rollouts = [s for batch, _ in self._watched for s in batch.rollouts]
        lengths = [n for batch, _ in self._watched for n in batch.pack.sizes]
        parts = {
            name: cut(np.concatenate(rows), lengths)
            for name, rows in zip(packs[0], zip(*hosts, strict=True), strict=True)
        }
        slopes = parts.pop("slopes"), parts.pop("slopes of values", None)
        names, sizes = [s.name for s in rollouts], [len(batch.logps) for batch, _ in self._watched]
        completions = [
            Tokens(name=s.name, weight=s.weight, pair=s.unit, **{name: own[i] for name, own in parts.items()})
            for i, s in enumerate(rollouts)
        ]
        check("log-prob", names, by_logps(self._method, completions, config, beta), slopes[0], sizes)
        if slopes[1] is not None:
            check("value", names, by_values(completions, config), slopes[1], sizes)

    def _beta(self) -> float:
        """The weight of the reference model in the loss; 0 where the KL is in the reward or not used."""
        objective, config = self._objective, self._objective.config
        if self._method == "online_dpo":
            return config.beta_of(objective.epoch)
        return config.beta if objective.uses_reference and not objective.kl_in_reward else 0.0

    @staticmethod
    def _columns(batch: TokenBatch, found: dict[str, torch.Tensor], beta: float) -> dict[str, torch.Tensor]:
        """What the formulas need of a pack, by the fields of `Tokens`, and the gradients that were found."""
        zeros = torch.zeros_like(batch.logps)
        columns = {
            "logps": batch.logps.detach(),
            "old_logps": batch.old_logps,
            "behaviour": batch.behaviour_logps,
            "advantages": batch.advantages,
            "kept": batch.kept(),
            "slopes": found.get("logps", zeros),
        }
        if beta:
            columns["ref_logps"] = batch.pack.column("ref_logps")
        values = _values(batch)
        if values is not None:
            columns |= {
                "values": values,
                "old_values": batch.pack.column("values"),
                "returns": batch.pack.column("returns"),
                "slopes of values": found.get("values", zeros),
            }
        return columns


def _values(batch: TokenBatch) -> torch.Tensor | None:
    """The critic's values; None if the method's loss does not use them, because there are no returns."""
    return batch.values if batch.sequences[0].returns is not None else None
