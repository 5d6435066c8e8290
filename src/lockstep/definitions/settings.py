"""Reads what the user has asked for from the fields of a config, a second time.

It is read when a trainer gets its config, before anything else uses the config. The values that requests, completions
and losses really have are compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        thinking: smallest and largest number of tokens after which thinking is interrupted; None: it is never interrupted.
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
    """What a config's fields ask for.

    Args:
        fields: the values of all fields by name.
    """
    # TRL's `generation_kwargs` sets the same fields in another way.
    given = {**fields, **(fields.get("generation_kwargs") or {})}
    if given.get("do_sample") is False:
        given["top_k"] = 1
    latest, earliest = given["max_thinking_length"], given["min_thinking_length"]
    allowed = given["allowed_token_ids"]
    return UserSettings(
        temperature=float(given["temperature"]),
        max_tokens=int(given["max_completion_length" if "max_completion_length" in given else "max_new_tokens"]),
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
