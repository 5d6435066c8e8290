"""The verdicts of an audit on tokens, weights, log-probs and draws: figures, limits, and the cause of a difference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lockstep.contract.distribution import Distribution
from lockstep.contract.sampling import Sampling
from lockstep.extras.audit.causes import Cause, Suspects, explain, mean_gap
from lockstep.extras.audit.dumps import AuditedRollout
from lockstep.extras.audit.rollout_logprobs import Scored, Values, score
from lockstep.models.arithmetic import Precision
from lockstep.tokens.chat import embedding_rows
from lockstep.watch.draws import BETS, FALSE_ALARM, DrawEvidence, TokenDraws, measure_draws
from lockstep.watch.gap import GapStats, measure_gap, over_limits
from lockstep.watch.tolerances import Tolerance, tolerance

AGREE, DIFFER, UNKNOWN = "agree", "DIFFER", "not judged"
_ABOUT = ("tokens", "weights", "log-probs", "draws")
# Rollouts of which an explanation is sought.
_EXPLAINED = 8
# Two rollouts of one prompt are equal by chance with a probability of at most exp of this.
_TOO_UNLIKELY = math.log(1e-9)
# Name of the distribution of a server's own log-probs.
_PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Finding:
    """`AGREE`, `DIFFER` or `UNKNOWN` about tokens, weights, log-probs or draws: figures, the cause, and what to do."""

    about: str
    verdict: str
    says: str
    remedy: str = ""


def audit(
    rollouts: Sequence[AuditedRollout],
    suspects: Suspects,
    limit: Tolerance,
    precision: Precision,
    served: Sequence[Values] | None = None,
) -> list[Finding]:
    """Judge rollouts by the gap that the dtypes of the two sides allow.

    Args:
        served: for each rollout, the log-probs that a running server gives at temperature 1; None: no server was named.
    """
    malformed = _malformed(rollouts, embedding_rows(suspects.model))
    if malformed is not None:
        unusable = [Finding(about, UNKNOWN, "the ids are not usable") for about in _ABOUT[1:]]
        return [malformed, *unusable]
    # The server gives log-probs at temperature 1 and without filters.
    plain = {} if served is None else {_PLAIN: replace(suspects.stated, sampling=Sampling(1))}
    model, stated = suspects.model, suspects.stated
    sampled = [(rollout, _stated(stated, rollout)) for rollout in rollouts if rollout.tokens]
    scored = [score(model, rollout, own, precision, plain, draws=True) for rollout, own in sampled]
    if not scored:
        return [Finding(about, UNKNOWN, "no id of the dump was sampled") for about in _ABOUT]
    missing = [s.rollout.name for s in scored if not np.isfinite(s.reported).all()]
    if missing:
        says = f"{len(missing)} rollouts have sampled ids without a finite log-prob, {missing[0]} first"
        found = {about: Finding(about, UNKNOWN, "log-probs are missing") for about in _ABOUT}
        remedy = "refuse such answers; never put 0.0 in their place"
        return list((found | {"log-probs": Finding("log-probs", DIFFER, says, remedy)}).values())
    gap = _gap(scored)
    # A filter that was not stated by the dump may leave a sampled id without probability.
    over = (
        over_limits(gap, limit)
        if gap is not None
        else ["a sampled id has probability 0 under the stated distribution"]
    )
    figures = (
        "no finite gap"
        if gap is None
        else f"mean |g| {gap.mean_abs:.2g}, max {gap.max_abs:.2g} nats over {gap.tokens} ids"
    )
    cause = (_cause(scored, suspects, limit) or _rounding(gap)) if over else None
    return [
        _tokens(rollouts, cause),
        _weights(scored, cause, over, limit, served),
        _log_probs(figures, over, cause),
        _draws(scored, over),
    ]


def _stated(stated: Distribution, rollout: AuditedRollout) -> Distribution:
    if rollout.temperature is None:
        return stated
    return replace(stated, sampling=replace(stated.sampling, temperature=rollout.temperature))


def _malformed(rollouts: Sequence[AuditedRollout], vocabulary: int) -> Finding | None:
    for rollout in rollouts:
        strange = [i for i in (*rollout.prompt_ids, *rollout.completion_ids) if not 0 <= i < vocabulary]
        if strange:
            says = f"{rollout.name} has the id {strange[0]}; the model has {vocabulary} ids"
            remedy = "the dump is of another tokenizer or vocabulary; name the model of that step"
            return Finding("tokens", DIFFER, says, remedy)
    return None


def _gap(scored: Sequence[Scored]) -> GapStats | None:
    own = np.concatenate([s.own for s in scored]) if scored else np.array([])
    if not np.isfinite(own).all():
        return None
    reported = np.concatenate([s.reported for s in scored])
    names = [s.rollout.name for s in scored]
    return measure_gap(torch.from_numpy(reported), torch.from_numpy(own), names, [len(s.own) for s in scored])


def _cause(scored: Sequence[Scored], suspects: Suspects, limit: Tolerance) -> Cause | None:
    def size(s: Scored) -> float:
        gaps = np.abs(s.gaps)
        return float(gaps.mean()) if np.isfinite(gaps).all() else math.inf

    worst = sorted((s for s in scored if len(s.own)), key=size, reverse=True)
    apart = [s for s in worst if size(s) > limit.mean] or worst
    chosen = apart[:_EXPLAINED]
    stated = _stated(suspects.stated, chosen[0].rollout)
    return explain(chosen, scored, replace(suspects, stated=stated))


def _rounding(gap: GapStats | None) -> Cause | None:
    """The rounding of an engine in half precision, which no single change takes away."""
    if gap is None or over_limits(gap, tolerance(torch.bfloat16, torch.bfloat16)):
        return None
    says = "numerics: the gap is as small as that of an engine in bfloat16, and nothing else explains it"
    remedy = "give --dtype bfloat16 if the engine has it; smaller faults may hide below its rounding"
    return Cause("log-probs", says, remedy, gap.mean_abs)


def _tokens(rollouts: Sequence[AuditedRollout], cause: Cause | None) -> Finding:
    sampled = sum(r.tokens for r in rollouts)
    figures = f"{len(rollouts)} rollouts, {sampled} sampled ids"
    if cause is not None and cause.about == "tokens":
        return Finding("tokens", DIFFER, cause.says, cause.remedy)
    if cause is None:
        return Finding("tokens", AGREE, figures)
    return Finding("tokens", UNKNOWN, f"{figures}; nothing points to other ids, but the log-probs differ")


def _weights(
    scored: Sequence[Scored],
    cause: Cause | None,
    over: list[str],
    limit: Tolerance,
    served: Sequence[Values] | None,
) -> Finding:
    if served is not None:
        apart = mean_gap([(values, s.others[_PLAIN]) for values, s in zip(served, scored, strict=True)])
        if apart > limit.mean:
            says = f"the server's own log-probs differ from the model's by {apart:.2g} nats on average "
            remedy = "the server holds other weights than the directory; push, or name the right one"
            return Finding("weights", DIFFER, f"{says}(limit {limit.mean:.2g})", remedy)
        says = f"the server agrees with the model now (mean |g| {apart:.2g} nats); the dump does not"
        if not over:
            says = f"the dump and the server agree with the model; server: mean |g| {apart:.2g} nats"
        return Finding("weights", AGREE, says)
    if not over:
        says = "the model gives the reported log-probs, so these are the weights that sampled"
        return Finding("weights", AGREE, says)
    if cause is not None and cause.about == "weights":
        return Finding("weights", DIFFER, cause.says, cause.remedy)
    if cause is not None:
        return Finding("weights", UNKNOWN, f"with the cause taken away, mean |g| is {cause.left:.2g} nats")
    says = "other settings, other ids and misplaced rows do not explain the gap; other weights, or another forward, do"
    remedy = "name older checkpoints with --earlier, or a running server with --url, to find out which"
    return Finding("weights", DIFFER, says, remedy)


def _log_probs(figures: str, over: list[str], cause: Cause | None) -> Finding:
    if not over:
        return Finding("log-probs", AGREE, figures)
    if cause is not None and cause.about == "log-probs":
        return Finding("log-probs", DIFFER, f"{figures} ({over[0]}): {cause.says}", cause.remedy)
    return Finding("log-probs", DIFFER, f"{figures} ({over[0]})", "see the finding above")


def _draws(scored: Sequence[Scored], over: list[str]) -> Finding:
    twin = _equal_by_no_chance(scored)
    if twin is not None:
        says = f"{twin[0]} and {twin[1]} have the same prompt and the same ids, which chance makes less than "
        return Finding("draws", DIFFER, f"{says}once in 1e9 times", "give every request a seed of its own")
    if over:
        says = "the log-probs differ; without them it is not known from what the ids should be drawn"
        return Finding("draws", UNKNOWN, says)
    columns = ("logps", "entropies", "variances", "below", "upto")
    draws = TokenDraws(*(np.concatenate([getattr(s.draws, name) for s in scored]) for name in columns))
    reported = torch.from_numpy(np.concatenate([s.reported for s in scored]))
    stats = measure_draws(draws, reported, [len(s.own) for s in scored])
    evidence = DrawEvidence()
    evidence.add(stats)
    found, enough = evidence.log_evidence / math.log(10), -math.log10(FALSE_ALARM)
    believed = f"it is believed from 1e{enough:.0f} on"
    figures = f"z {stats.z:+.1f} over {stats.tokens} ids, evidence 1e{found:.1f} ({believed})"
    if evidence.log_evidence > -math.log(FALSE_ALARM):
        says = (
            f"the engine {BETS[evidence.strongest].suspicion} ({figures}), although its log-probs are right"
        )
        remedy = "look for a temperature, filter, greedy choice or best-of-n beside the stated settings"
        return Finding("draws", DIFFER, says, remedy)
    return Finding("draws", AGREE, figures)


def _equal_by_no_chance(scored: Sequence[Scored]) -> tuple[str, str] | None:
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Scored]] = defaultdict(list)
    for s in scored:
        key = tuple(s.rollout.prompt_ids), tuple(s.rollout.completion_ids)
        if seen[key] and float(s.own.sum()) < _TOO_UNLIKELY:
            return seen[key][0].rollout.name, s.rollout.name
        seen[key].append(s)
    return None
