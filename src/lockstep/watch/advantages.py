"""Proof of advantages and weights: what enters the loss is what the method's definition makes of the scores.

The expected values stand in `definitions/`. They start from the scores, not from the run's rewards.

Proof `advantages`.
Shows: the advantage and the weight of every token that enters the loss are what a second implementation in float64
makes of the scores, with the weights that the user has asked for.
Does not show: that a reward function scored the right text (`scores` shows this); objectives of your own are not
compared.
When: every micro-batch, before its loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.definitions import advantages as define
from lockstep.definitions.advantages import prompt_weights, token_weights
from lockstep.definitions.sampling import weighted_sum
from lockstep.errors import ProofError
from lockstep.learn.methods.objective import Objective, TokenBatch
from lockstep.learn.sequence import TrainingSequence, rollouts_of
from lockstep.rollouts.group import RolloutGroup
from lockstep.whose_code import is_lockstep

# By loss type of GRPO, how tokens are averaged.
_AVERAGES = {"grpo": "completions", "sapo": "completions", "dr_grpo": "limit", "luspo": "sums"}
# float32 holds an advantage and the rewards behind it.
_LOOSE = 1e-5


@dataclass(frozen=True, slots=True)
class Scored:
    """One scored completion, which has N sampled tokens.

    Attributes:
        name: its key.
        prompt: id of its prompt. Completions of one prompt are one group.
        branches: name and number of sampled tokens of each of its sequences.
        scores: one score per reward function; None: no score.
        failed, cut: whether it could not be finished, and whether the length limit cut it.
        old_logps, ref_logps, values: (N,) under the policy, the reference model and the critic, where the method uses
            them.
    """

    name: str
    prompt: str
    branches: Sequence[tuple[str, int]]
    scores: Sequence[float | None]
    failed: bool
    cut: bool
    old_logps: Sequence[float] | None = None
    ref_logps: Sequence[float] | None = None
    values: Sequence[float] | None = None

    @property
    def length(self) -> int:
        """N: number of sampled tokens."""
        return sum(count for _, count in self.branches)

    @property
    def divergences(self) -> list[float]:
        """(N,) log-prob under the policy minus that under the reference model; zeros without a reference model."""
        if self.ref_logps is None or self.old_logps is None:
            return [0.0] * self.length
        return [own - other for own, other in zip(self.old_logps, self.ref_logps, strict=True)]


@dataclass(frozen=True, slots=True)
class Expected:
    """The values with which a sequence must enter the loss; `slack`: what float32 explains of an advantage."""

    advantages: np.ndarray
    slack: float
    weight: float


class AdvantageProof:
    """The proof of a generation, whose completions come in the order in which steps take them.

    `reward_weights` are those that the user has asked for, in the order of the reward functions.
    """

    def __init__(
        self, method: str, completions: Sequence[Scored], settings: Any, reward_weights: tuple[float, ...]
    ) -> None:
        self._settings, self._all, self._reward_weights = settings, list(completions), reward_weights
        self._masked = {
            c.name
            for c in completions
            if c.failed or (c.cut and getattr(settings, "mask_truncated_completions", False))
        }
        groups: dict[str, list[Scored]] = {}
        for c in completions:
            groups.setdefault(c.prompt, []).append(c)
        self._groups = list(groups.values())
        self._rewards = {c.name: weighted_sum(list(c.scores), reward_weights) for c in completions}
        made = {
            "grpo": self._grpo,
            "rloo": self._rloo,
            "reinforce++": self._reinforce,
            "ppo": self._ppo,
            "online_dpo": self._pairs,
        }[method]()
        weights = self._weights(method)
        self._expected: dict[str, Expected] = {}
        for c in completions:
            values, slack = made[c.name]
            start = 0
            for name, count in c.branches:
                own = np.asarray(values[start : start + count], np.float64)
                self._expected[name] = Expected(own, slack, weights[c.name])
                start += count

    # ---- expected values --------------------------------------------------------------------------------------------

    def _of(self, group: Sequence[Scored]) -> list[float | None]:
        return [self._rewards[c.name] for c in group]

    def _spread(
        self, groups: Sequence[Sequence[float | None]], slack: float = _LOOSE
    ) -> dict[str, tuple[list[float], float]]:
        """One advantage per completion, repeated for each of its tokens."""
        pairs = _paired(self._groups, groups)
        return {c.name: ([0.0 if a is None else a] * c.length, slack * (1 + abs(a or 0.0))) for c, a in pairs}

    def _grpo(self) -> dict[str, tuple[list[float], float]]:
        settings = self._settings
        if settings.multi_objective_aggregation == "normalize_then_sum":
            count = len(self._all[0].scores)
            weights = [*self._reward_weights, *([1.0] * count)][:count]
            scores = [[[c.scores[k] for c in g] for k in range(count)] for g in self._groups]
            rows = iter(define.gdpo(scores, weights))
            return self._spread([[next(rows) for _ in group] for group in self._groups])
        # The run computes in float32.
        rewards = [[None if r is None else float(np.float32(r)) for r in self._of(g)] for g in self._groups]
        if settings.filter_zero_variance:
            rewards = [own if _varies(own) else [None] * len(own) for own in rewards]
        size = max((abs(r) for own in rewards for r in define.scored(own)), default=0.0)
        made = define.grpo(rewards, settings.scale_rewards)
        found: dict[str, tuple[list[float], float]] = {}
        every = [r for own in rewards for r in define.scored(own)]
        for group, own, advantages in zip(self._groups, rewards, made, strict=True):
            divisor = 1.0
            if settings.scale_rewards == "group":
                divisor = define.deviation(define.scored(own)) + define.EPSILON
            elif settings.scale_rewards == "batch":
                divisor = define.deviation(every) + define.EPSILON
            elif settings.scale_rewards == "advantages":
                centred = [d for g in rewards for d in define.scored(define.centred(g))]
                divisor = define.deviation(centred) + define.EPSILON
            rounding = 1e-6 * size / divisor if _varies(own) else 0.0
            for c, a in zip(group, advantages, strict=True):
                due = a if a is not None and _varies(own) else 0.0
                found[c.name] = ([due] * c.length, _LOOSE * (1 + abs(due)) + rounding * (1 + abs(due)))
        return found

    def _rloo(self) -> dict[str, tuple[list[float], float]]:
        settings = self._settings
        groups = [self._of(group) for group in self._groups]
        if settings.reward_clip_range is not None:
            low, high = settings.reward_clip_range
            groups = [[None if r is None else min(max(r, low), high) for r in own] for own in groups]
        if settings.beta != 0.0:
            whole = {c.name: 0.0 if c.name in self._masked else math.fsum(c.divergences) for c in self._all}
            paid = [[whole[c.name] for c in group] for group in self._groups]
            groups = [
                [None if r is None else r - settings.beta * kl for r, kl in zip(own, kls, strict=True)]
                for own, kls in zip(groups, paid, strict=True)
            ]
        made = [define.leave_one_out(own) for own in groups]
        if settings.normalize_advantages:
            kept = [define.has_comparison(own) for own in groups]
            rows = iter(define.whitened([a if k else None for a, k in _paired(made, kept)]))
            made = [[next(rows) for _ in own] for own in made]
        return self._spread(made)

    def _reinforce(self) -> dict[str, tuple[list[float], float]]:
        settings = self._settings
        grouped = settings.baseline == "group"
        rewards, learned = {}, {}
        for group in self._groups:
            own = self._of(group)
            kept = define.has_comparison(own) if grouped else [r is not None for r in own]
            values = define.centred(own) if grouped else own
            for c, value, k in zip(group, values, kept, strict=True):
                rewards[c.name], learned[c.name] = value or 0.0, k and c.name not in self._masked
        sums = {
            c.name: define.returns_to_go(
                rewards[c.name], [0.0] * c.length if grouped else c.divergences, settings.beta, settings.gamma
            )
            for c in self._all
        }
        return self._whitened(sums, learned)

    def _ppo(self) -> dict[str, tuple[list[float], float]]:
        settings = self._settings
        made, learned = {}, {}
        for c in self._all:
            reward = self._rewards[c.name]
            made[c.name] = define.gae(
                reward or 0.0, c.divergences, c.values or [], settings.beta, settings.gamma, settings.lam
            )
            learned[c.name] = reward is not None and c.name not in self._masked
        return self._whitened(made, learned)

    def _whitened(
        self, values: Mapping[str, Sequence[float]], learned: Mapping[str, bool]
    ) -> dict[str, tuple[list[float], float]]:
        """Values per token, whitened over the tokens of the generation that are learned from."""
        kept = [v if learned[c.name] else None for c in self._all for v in values[c.name]]
        rows = iter(define.whitened(kept))
        made = {c.name: [next(rows) or 0.0 for _ in range(c.length)] for c in self._all}
        return {name: (own, _LOOSE * (1 + max(map(abs, own), default=0.0))) for name, own in made.items()}

    def _pairs(self) -> dict[str, tuple[list[float], float]]:
        penalty = self._settings.missing_eos_penalty or 0.0
        signs = []
        for first, second in self._groups:
            paid = []
            for c in (first, second):
                reward = self._rewards[c.name]
                less = penalty if c.cut else 0.0
                paid.append(None if reward is None else float(np.float32(reward - less)))
            empty = not (first.length and second.length)
            signs.append((0.0, 0.0) if empty else define.preference(*paid))
        return self._spread(signs)

    def _weights(self, method: str) -> dict[str, float]:
        settings = self._settings
        average = {"rloo": "whole", "online_dpo": "pairs"}.get(method, "tokens")
        if method == "grpo":
            average = _AVERAGES.get(settings.loss_type, "tokens")
        dropped: set[str] = set()
        if method == "grpo" and settings.filter_zero_variance:
            groups = [
                (g, [None if r is None else float(np.float32(r)) for r in self._of(g)]) for g in self._groups
            ]
            dropped = {c.name for group, own in groups if not _varies(own) for c in group}
        weights = {c.name: 0.0 for c in self._all}
        size = settings.completions_per_step
        for start in range(0, len(self._all), size):
            step = [c for c in self._all[start : start + size] if c.name not in dropped]
            lengths = [0 if c.name in self._masked else c.length for c in step]
            if method == "grpo" and settings.average_by_prompt:
                made = prompt_weights(lengths, [c.prompt for c in step])
            else:
                made = token_weights(lengths, average, settings.completion_limit)
            weights |= {c.name: w for c, w in zip(step, made, strict=True)}
        return weights

    # ---- comparison -------------------------------------------------------------------------------------------------

    def check(
        self, names: Sequence[str], lengths: Sequence[int], advantages: np.ndarray, weights: np.ndarray
    ) -> None:
        """Compare B sequences, one after the other, with what is due: lengths in tokens, (N,) of all their tokens."""
        start = 0
        for name, length in zip(names, lengths, strict=True):
            due = self._expected.get(name)
            if due is None or len(due.advantages) != length:
                raise _wrong(
                    f"{name} enters the loss with {length} tokens and is not a completion of this generation"
                )
            own, weight = advantages[start : start + length], weights[start : start + length]
            start += length
            off = np.abs(own.astype(np.float64) - due.advantages)
            if not bool((off <= due.slack).all()):
                at = int(np.nan_to_num(off, nan=np.inf).argmax())
                raise _wrong(
                    f"token {at} of {name} enters the loss with an advantage of {own[at]:.6g}; its rewards give "
                    f"{due.advantages[at]:.6g}"
                )
            if not bool((np.abs(weight.astype(np.float64) - due.weight) <= 1e-5 * due.weight).all()):
                raise _wrong(
                    f"the tokens of {name} enter the loss with a weight of {weight[0]:.6g}; the lengths of "
                    f"the step give {due.weight:.6g}"
                )


def _varies(rewards: Sequence[float | None]) -> bool:
    """Whether at least two of the rewards that are there differ."""
    return len(set(define.scored(rewards))) > 1


def _paired(left: Sequence[Sequence[Any]], right: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    """The entries of two lists of groups, of which each group has as many as its counterpart."""
    for ours, theirs in zip(left, right, strict=True):
        yield from zip(ours, theirs, strict=True)


def _wrong(found: str) -> ProofError:
    return ProofError(
        "advantages",
        found,
        "advantages or weights were changed, permuted or computed from other completions, or by another rule",
        "let nothing change a generation between its rewards and its loss; otherwise this is a defect of "
        "Lockstep: report it",
    )


def check_batch(proof: AdvantageProof, batch: TokenBatch) -> None:
    """Compare a pack just before its loss."""
    both = torch.stack([batch.advantages.detach(), batch.weights.detach()]).cpu().numpy()
    proof.check([s.name for s in batch.sequences], [s.length for s in batch.sequences], both[0], both[1])


def check_still(proof: AdvantageProof, sequences: Sequence[TrainingSequence]) -> None:
    """Compare sequences that have no gradient."""
    for s in sequences:
        proof.check([s.name], [s.length], s.advantages, np.full(s.length, s.weight))


def advantage_proof(
    objective: Objective[Any],
    groups: Sequence[RolloutGroup],
    sequences: Sequence[TrainingSequence],
    reward_weights: tuple[float, ...],
) -> AdvantageProof | None:
    """The proof of a generation, before the advantages are made; None for an objective without a definition."""
    # A class of the user's own may compute other advantages.
    if objective.definition is None or not is_lockstep(type(objective)):
        return None
    found = {own[0].rollout or own[0].name: own for own in rollouts_of(sequences)}
    completions = []
    for group in groups:
        for rollout in group.rollouts:
            own = found.get(str(rollout.key), [])

            def column(name: str, own: list[TrainingSequence] = own) -> list[float] | None:
                parts = [getattr(s, name) for s in own]
                return None if any(p is None for p in parts) else [float(v) for p in parts for v in p]

            completions.append(
                Scored(
                    name=str(rollout.key),
                    prompt=group.prompt.prompt_id,
                    branches=[(s.name, s.length) for s in own],
                    scores=list(rollout.scores.values()),
                    failed=rollout.failed is not None,
                    cut=rollout.finish_reason == "length",
                    old_logps=column("old_logps") if objective.kl_in_reward else None,
                    ref_logps=column("ref_logps") if objective.kl_in_reward else None,
                    values=column("values"),
                )
            )
    return AdvantageProof(objective.definition, completions, objective.config, reward_weights)
