"""The sampling distribution, its settings and the rule of interruptions, written a second time.

Log-probs are computed from raw logits in float64. The order of the steps is vLLM's: allowed ids, bias, repetition
penalty, frequency and presence penalty, temperature. What the user has asked for is read from the fields of a config,
before anything else uses it. The values that requests, completions and losses really have are compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def logprob(
    logits: np.ndarray,
    token: int,
    temperature: float,
    *,
    kept: Sequence[int] | None = None,
    allowed: Sequence[int] | None = None,
    bias: Mapping[int, float] | None = None,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt: Sequence[int] = (),
    before: Sequence[int] = (),
) -> float:
    """The log-prob of one token.

    Args:
        logits: (V,) the logits that the model gives.
        kept: ids that the filters (top-k, top-p, min-p) kept; None: there are no filters.
        allowed: the only ids that may be sampled; None: all.
        bias: numbers that are added to the logits, by id.
        repetition: repetition penalty for ids in `prompt` and `before`. It divides positive logits and multiplies
            negative ones.
        presence: presence penalty, subtracted once from the logit of each id in `before`.
        frequency: frequency penalty, subtracted from the logit of each id as often as the id is in `before`.
        prompt: ids of the prompt.
        before: ids of the completion before the token.
    """
    scores = np.array(logits, np.float64)
    for place, value in (bias or {}).items():
        scores[place] += value
    if repetition != 1.0:
        seen = np.unique(np.array([*prompt, *before], np.int64))
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * repetition, scores[seen] / repetition)
    if presence or frequency:
        ids, counts = np.unique(np.array(before, np.int64), return_counts=True)
        scores[ids] -= frequency * counts + presence
    scores /= temperature
    support = kept if kept is not None else allowed
    candidates = scores if support is None else scores[np.array(support, np.int64)]
    top = candidates.max()
    return float(scores[token] - top - np.log(np.exp(candidates - top).sum()))


def broken_rule(
    ids: np.ndarray, sampled: np.ndarray, earliest: int, latest: int, inserted: np.ndarray, end: np.ndarray
) -> str | None:
    """How a completion breaks the rule of interruptions; None if it follows it.

    Args:
        ids: (N,) ids of the completion.
        sampled: (N,) bool, whether each id was sampled.
        earliest, latest: smallest and largest number of tokens after which a completion that still thinks is
            interrupted.
        inserted: ids of the interruption.
        end: consecutive ids that end the thinking.
    """
    places = np.flatnonzero(~sampled)
    if not len(places):
        if len(ids) > latest and not _contains(ids[:latest], end):
            return f"has {len(ids)} tokens, did not end its thinking within {latest} tokens, and was not interrupted"
        return None
    start = int(places[0])
    in_a_row = np.array_equal(places, np.arange(start, start + len(inserted)))
    if not in_a_row or not np.array_equal(ids[places], inserted):
        return f"has {len(places)} inserted ids, and they are not the {len(inserted)} ids of the interruption"
    if not earliest <= start <= latest:
        return f"was interrupted after {start} tokens instead of {earliest} to {latest}"
    if _contains(ids[:start], end):
        return f"was interrupted after {start} tokens, although it had ended its thinking"
    return None


def _contains(ids: np.ndarray, part: np.ndarray) -> bool:
    """Whether the ids of `part` come one after the other in `ids`."""
    starts = np.arange(len(ids) - len(part) + 1)
    return bool(len(starts)) and bool((ids[starts[:, None] + np.arange(len(part))] == part).all(axis=1).any())


# Settings of a request that are one number each, and the number that has no effect.
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
_GRAMMARS = (
    "vllm_structured_outputs_regex",
    "structured_outputs_json",
    "structured_outputs_choice",
    "structured_outputs_grammar",
)


@dataclass(frozen=True, slots=True)
class UserSettings:
    """What the user has asked for.

    Attributes:
        temperature: temperature of sampling.
        max_tokens: largest number of tokens of a completion, with the inserted tokens.
        stop: strings that end a completion.
        numbers: filters, penalties and the minimum length, by vLLM's names.
        logit_bias: numbers that are added to the logits, by token id.
        allowed_token_ids: the only ids that may be sampled; None: all.
        bad_words: texts that a completion must not contain.
        grammar: regular expression, JSON schema, choices or EBNF that a completion follows; None: it follows none.
        thinking: smallest and largest number of tokens after which thinking is interrupted; None: it is never
            interrupted.
        interruption: the text that is inserted there.
        end_of_thinking: the text that ends thinking.
        reward_weights: weights of the reward functions, in their order. Functions after the last weight have weight 1.
    """

    temperature: float
    max_tokens: int
    stop: tuple[str, ...]
    numbers: Mapping[str, float]
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    grammar: Any
    thinking: tuple[int, int] | None
    interruption: str
    end_of_thinking: str
    reward_weights: tuple[float, ...]


def user_settings(fields: Mapping[str, Any]) -> UserSettings:
    """What a config's fields, by name, ask for."""
    # TRL's `generation_kwargs` sets the same fields in another way.
    given = {**fields, **(fields.get("generation_kwargs") or {})}
    if given.get("do_sample") is False:
        given["top_k"] = 1
    latest, earliest = given["max_thinking_length"], given["min_thinking_length"]
    limit = "max_completion_length" if "max_completion_length" in given else "max_new_tokens"
    allowed = given["allowed_token_ids"]
    return UserSettings(
        temperature=float(given["temperature"]),
        max_tokens=int(given[limit]),
        stop=tuple(given["stop_strings"] or ()),
        numbers={name: float(given[name] or neutral) for name, neutral in _NEUTRAL.items()},
        logit_bias={int(token): float(bias) for token, bias in (given["logit_bias"] or {}).items()},
        allowed_token_ids=None if allowed is None else tuple(int(i) for i in allowed),
        bad_words=tuple(given["bad_words"] or ()),
        grammar=next((given[name] for name in _GRAMMARS if given[name] is not None), None),
        thinking=None if latest is None else (latest if earliest is None else earliest, latest),
        interruption=given["interruption"],
        end_of_thinking=given["end_of_thinking"],
        reward_weights=tuple(float(w) for w in given["reward_weights"] or ()),
    )


def weighted_sum(scores: list[float | None], weights: tuple[float, ...]) -> float | None:
    """The reward of one completion: the sum of its scores, each times its weight. None: it has no score.

    Args:
        scores: one per reward function, in the order of the functions; None: the function gave no score.
        weights: of the functions. A function without a weight has weight 1.
    """
    total, has_score = 0.0, False
    for position, score in enumerate(scores):
        if score is not None:
            total += score * (weights[position] if position < len(weights) else 1.0)
            has_score = True
    return total if has_score else None
