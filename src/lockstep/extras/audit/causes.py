"""Explains a gap between reported log-probs and the model's: the same ids are scored with one thing changed at a time.

The change that makes the gap vanish is the cause. The rollouts whose gap is largest are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.contract.distribution import Distribution
from lockstep.extras.audit.dumps import AuditedRollout
from lockstep.extras.audit.rollout_logprobs import Scored, Values, score
from lockstep.models.arithmetic import Precision

# An explanation counts only if it leaves less than this share of the gap.
_EXPLAINS = 0.5
_TEMPERATURES = tuple(round(0.05 * i, 2) for i in range(4, 41))
_TOP_P, _TOP_K, _MIN_P = (0.5, 0.8, 0.9, 0.95, 0.99), (5, 10, 20, 50, 100), (0.01, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Cause:
    """An explanation: what differs (`tokens`, `weights`, `log-probs`), a sentence, what to do, and mean |g| left."""

    about: str
    says: str
    remedy: str
    left: float


@dataclass(frozen=True, slots=True)
class Suspects:
    """What an explanation may use: the policy of the step, the stated distribution, and loaders of older policies."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stated: Distribution
    earlier: Mapping[str, Callable[[], PreTrainedModel]]


def explain(worst: Sequence[Scored], all_scored: Sequence[Scored], suspects: Suspects) -> Cause | None:
    """The explanation that leaves least of the gap of the worst rollouts; None if none leaves less than half of it."""
    gap = mean_gap((s.reported, s.own) for s in worst)
    tried = [
        *_misplaced(worst, all_scored),
        *_other_distributions(worst, suspects),
        *_other_prompts(worst, suspects),
        *_other_precisions(worst, suspects),
        *_older_weights(worst, suspects),
    ]
    best = min(tried, key=lambda cause: cause.left, default=None)
    return best if best is not None and best.left < _EXPLAINS * gap else None


def mean_gap(pairs: Iterator[tuple[Values, Values]] | Sequence[tuple[Values, Values]]) -> float:
    """Mean |reported − own| over all ids of several rollouts; infinite without ids, or if one has no probability."""
    gaps = [np.abs(reported - own) for reported, own in pairs]
    joined = np.concatenate(gaps) if gaps else np.array([])
    return float(joined.mean()) if len(joined) and np.isfinite(joined).all() else float("inf")


# ---- log-probs that stand in the wrong place ---------------------------------------------------------------------


def _misplaced(worst: Sequence[Scored], all_scored: Sequence[Scored]) -> list[Cause]:
    long = [s for s in worst if len(s.own) > 2]
    late = mean_gap((s.reported[1:], s.own[:-1]) for s in long)
    early = mean_gap((s.reported[:-1], s.own[1:]) for s in long)
    shifted = "within a rollout the log-probs stand one id {}: each is that of its neighbour"
    remedy = "look at where the labels are shifted against the logits, and at ids that were dropped at the start or end"
    swapped = mean_gap((s.reported, other.own[: len(s.own)]) for s, other in _nearest_rows(worst, all_scored))
    return [
        Cause("log-probs", shifted.format("too late"), remedy, late),
        Cause("log-probs", shifted.format("too early"), remedy, early),
        Cause(
            "log-probs",
            "rows are shifted against each other: the log-probs of a rollout are those of another rollout of the file",
            "look up answers by a key of the request, never by their place in a list",
            swapped,
        ),
    ]


def _nearest_rows(worst: Sequence[Scored], all_scored: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    """For each rollout, the other rollout of at least its length whose log-probs are nearest to the reported ones."""
    pairs = []
    for s in worst:
        others = [o for o in all_scored if o is not s and len(o.own) >= len(s.own) > 1]
        if others:
            pairs.append((s, min(others, key=lambda o: mean_gap([(s.reported, o.own[: len(s.own)])]))))
    return pairs if len(pairs) == len(worst) else []


# ---- another distribution ----------------------------------------------------------------------------------------


_PROCESSED = (
    "in vLLM, set logprobs_mode to processed_logprobs; elsewhere, divide by the temperature "
    "and apply the filters"
)
_ONE_TEMPERATURE = (
    "give --temperature if the run used another one; otherwise one side applies it twice, or not at all"
)


def _other_distributions(worst: Sequence[Scored], suspects: Suspects) -> list[Cause]:
    sampling = suspects.stated.sampling
    named = dict(suspects.stated.others())
    filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    if sampling.temperature != 1.0 and not filtered:
        named["the raw distribution"] = replace(suspects.stated, sampling=replace(sampling, temperature=1.0))
    raw = frozenset(named)
    named |= {f"temperature {t:g}": _with(suspects.stated, temperature=t) for t in _TEMPERATURES}
    if not filtered:
        named |= {f"top_p {value:g}": _with(suspects.stated, top_p=value) for value in _TOP_P}
        named |= {f"top_k {value}": _with(suspects.stated, top_k=value) for value in _TOP_K}
        named |= {f"min_p {value:g}": _with(suspects.stated, min_p=value) for value in _MIN_P}
    scored = [score(suspects.model, s.rollout, suspects.stated, others=named) for s in worst]
    causes = []
    for name in named:
        left = mean_gap((s.reported, s.others[name]) for s in scored)
        if name in raw:
            says = (
                f"the reported log-probs are those of {name}, not those of the distribution that was sampled"
            )
            remedy = _PROCESSED
        elif name.startswith("temperature"):
            says = f"the log-probs are those of {name}; {sampling.temperature:g} was stated"
            remedy = _ONE_TEMPERATURE
        else:
            says = f"the engine sampled with a filter like {name} that was not stated, and its log-probs are those "
            says += "after the filter"
            remedy = "state the filter (--top_k, --top_p, --min_p); engines take defaults from generation_config.json"
        causes.append(Cause("log-probs", says, remedy, left))
    return causes


def _with(stated: Distribution, **changes: float) -> Distribution:
    return replace(stated, sampling=replace(stated.sampling, **changes))  # type: ignore[arg-type]


# ---- other tokens ------------------------------------------------------------------------------------------------


def _other_prompts(worst: Sequence[Scored], suspects: Suspects) -> list[Cause]:
    tokenizer, bos = suspects.tokenizer, suspects.tokenizer.bos_token_id

    def again(rollout: AuditedRollout) -> list[int]:
        return list(tokenizer.encode(tokenizer.decode(rollout.prompt_ids), add_special_tokens=False))

    def with_special(rollout: AuditedRollout) -> list[int]:
        return list(tokenizer.encode(tokenizer.decode(rollout.prompt_ids), add_special_tokens=True))

    ways: dict[str, Callable[[AuditedRollout], list[int]]] = {
        "the engine saw the prompt encoded again from its text, which gives other ids": again,
        "the engine saw the prompt encoded again from its text, with special tokens once more": with_special,
    }
    if bos is not None:
        ways["the engine saw the prompt with one more begin token"] = lambda r: [bos, *r.prompt_ids]
        ways["the engine saw the prompt without its begin token"] = lambda r: (
            r.prompt_ids[1:] if r.prompt_ids[0] == bos and len(r.prompt_ids) > 1 else r.prompt_ids
        )
    causes = []
    for says, way in ways.items():
        prompts = [way(s.rollout) for s in worst]
        if all(prompt == s.rollout.prompt_ids for prompt, s in zip(prompts, worst, strict=True)):
            continue
        model, stated = suspects.model, suspects.stated
        pairs = zip(worst, prompts, strict=True)
        scored = [score(model, s.rollout, stated, prompt_ids=prompt) for s, prompt in pairs]
        remedy = "give the engine ids instead of text, and encode each prompt once"
        causes.append(Cause("tokens", says, remedy, _left(scored)))
    return causes


def _left(scored: Sequence[Scored]) -> float:
    return mean_gap((s.reported, s.own) for s in scored)


# ---- numerics, and other weights ---------------------------------------------------------------------------------


def _other_precisions(worst: Sequence[Scored], suspects: Suspects) -> list[Cause]:
    half = Precision(None, torch.bfloat16)
    scored = [score(suspects.model, s.rollout, suspects.stated, half) for s in worst]
    says = "numerics: the engine seems to compute its output head in bfloat16"
    return [Cause("log-probs", says, "let both sides compute the head in one dtype", _left(scored))]


def _older_weights(worst: Sequence[Scored], suspects: Suspects) -> list[Cause]:
    causes = []
    for name, load in suspects.earlier.items():
        older = load()
        scored = [score(older, s.rollout, suspects.stated) for s in worst]
        says = f"staleness: the rollouts were sampled by the weights of {name}"
        remedy = "push the weights before every generation, or count how old tokens are"
        causes.append(Cause("weights", says, remedy, _left(scored)))
        for part in _parts(suspects.model):
            with _replaced(suspects.model, older, part):
                scored = [score(suspects.model, s.rollout, suspects.stated) for s in worst]
            says = (
                f"an old tensor: the engine seems to hold {part} of {name}, and everything else as it is now"
            )
            remedy = "look at how this part is loaded: fused, tied, packed or skipped"
            causes.append(Cause("weights", says, remedy, _left(scored)))
    return causes


def _parts(model: PreTrainedModel) -> list[str]:
    """The modules that hold parameters of their own, by name."""
    return [n for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]


@contextmanager
def _replaced(model: PreTrainedModel, older: PreTrainedModel, part: str) -> Iterator[None]:
    """The model with one module's parameters of an older one. A tied weight changes in this module alone."""
    module, other = model.get_submodule(part), older.get_submodule(part)
    held = dict(module._parameters)
    module._parameters.update(other._parameters)
    try:
        yield
    finally:
        module._parameters.update(held)
