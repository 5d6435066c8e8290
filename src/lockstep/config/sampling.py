"""The fields of sampling and of interruptions, and what engines take of them.

The fields that shape the sampling distribution: temperature, filters, penalties, allowed tokens, structured outputs.

`OnlineConfig` inherits the fields. `sampling_of` makes a `Sampling` of them. The engine samples from
this distribution, and the trainer scores the same one.

The fields that say when a run interrupts thinking, and with which text.

`interruption_of` turns them into token ids with a tokenizer. The result goes to the program that interrupts rollouts
(`rollouts/programs/interruptions.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from lockstep.config.checks import check_bounds
from lockstep.config.option import COUNT, SHARE, Bounds, option
from lockstep.contract.sampling import (
    GRAMMAR_FIELDS,
    LARGEST_TEMPERATURE,
    SMALLEST_TEMPERATURE,
    Grammar,
    GrammarCompiler,
    GrammarKind,
    Sampling,
    check_grammar,
)
from lockstep.contract.support import Bans
from lockstep.errors import InputError
from lockstep.rollouts.programs.interruptions import Interruption

if TYPE_CHECKING:
    from lockstep.config.run import OnlineConfig

_logger = logging.getLogger(__name__)

# What each field of `Sampling` is made of the config's field of the same name. The keys of a JSON mapping are texts.
_MADE: dict[str, Callable[[Any], Any]] = {
    "top_p": float,
    "top_k": int,
    "min_p": lambda given: float(given or 0.0),
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "logit_bias": lambda given: tuple(
        sorted((int(token), float(value)) for token, value in (given or {}).items())
    ),
    "allowed_token_ids": lambda given: None if given is None else tuple(map(int, given)),
    "min_tokens": int,
    "max_kept_ids": int,
}
# Keys that `generation_kwargs` may have: fields of this class. Other settings have fields elsewhere.
_KWARGS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
)
_ELSEWHERE = {
    "temperature": "temperature",
    "max_tokens": "max_completion_length (Online DPO: max_new_tokens)",
    "max_new_tokens": "max_completion_length (Online DPO: max_new_tokens)",
    "min_new_tokens": "min_tokens",
    "stop": "stop_strings",
    "stop_strings": "stop_strings",
    "seed": "seed",
}
# Keys of transformers' `generate` that are taken with this value only, and why not with another.
_PLAIN = {
    "num_beams": (
        1,
        "a beam search keeps other tokens than the policy's probabilities would, so no log-prob belongs to them",
    ),
    "use_cache": (True, "the engines always keep a cache; it changes no token"),
}


@dataclass
class FilterFields:
    """What may be sampled, and how likely it is."""

    temperature: float = option(
        1.0,
        "Sampling temperature; the trainer scores the same.",
        group="sampling",
        common=True,
        bounds=Bounds(SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE, usual=(0.05, 10)),
    )
    stop_strings: list[str] | None = option(
        None, "Strings that end a completion. Special tokens may be among them.", group="sampling"
    )
    top_p: float = option(
        1.0,
        "Sample among the likeliest tokens that together have this probability; 1: all.",
        group="sampling",
        bounds=SHARE,
        common=True,
    )
    top_k: int = option(
        0, "Sample among this many likeliest tokens; 0: all.", group="sampling", bounds=Bounds(0)
    )
    min_p: float | None = option(
        None,
        "Sample among tokens at least this share as likely as the likeliest; unset: all.",
        group="sampling",
        bounds=Bounds(0, 1),
    )
    repetition_penalty: float = option(
        1.0,
        "Divides the logits of tokens of prompt and completion (negative: multiplies); 1: none.",
        group="sampling",
        bounds=Bounds(0, above=True),
    )
    presence_penalty: float = option(
        0.0,
        "Subtracted from the logits of tokens that the completion already has.",
        group="sampling",
        bounds=Bounds(-2, 2),
    )
    frequency_penalty: float = option(
        0.0,
        "Subtracted as often as the completion already has the token.",
        group="sampling",
        bounds=Bounds(-2, 2),
    )
    logit_bias: dict | str | None = option(
        None, "Token ids, and what is added to the logit of each.", group="sampling", mapping=True
    )
    bad_words: list[str] | None = option(None, "Texts that a completion must not contain.", group="sampling")
    allowed_token_ids: list[int] | None = option(
        None, "The only token ids that may be sampled; unset: all.", group="sampling"
    )
    min_tokens: int = option(
        0,
        "Tokens before which neither an end token nor a stop string ends a completion.",
        group="sampling",
        bounds=Bounds(0),
    )
    generation_kwargs: dict | str | None = option(
        None, f"TRL's other way to set {', '.join(_KWARGS)}.", group="sampling", mapping=True
    )
    vllm_structured_outputs_regex: str | None = option(
        None, "Regular expression that every completion follows.", group="sampling"
    )
    structured_outputs_json: dict | str | None = option(
        None, "JSON schema that every completion follows.", group="sampling"
    )
    structured_outputs_choice: list[str] | None = option(
        None, "Texts of which every completion is one.", group="sampling"
    )
    structured_outputs_grammar: str | None = option(
        None, "Grammar in EBNF (root ::= ...) that every completion follows.", group="sampling"
    )
    max_kept_ids: int = option(
        32768,
        "Largest number of tokens that top_p, top_k and min_p may keep at one place; bounds the memory.",
        group="sampling",
        bounds=COUNT,
        only_with="filter",
    )

    def take_generation_kwargs(self) -> None:
        """Set the fields that `generation_kwargs` name.

        Raises:
            InputError: a key is unknown, or contradicts its field.
        """
        given: Any = self.generation_kwargs or {}
        if not isinstance(given, Mapping):
            raise InputError(f'generation_kwargs={given!r}; it must be a mapping, such as {{"top_k": 50}}')
        defaults = {f.name: f.default for f in fields(FilterFields)}
        for name, value in given.items():
            if name in _ELSEWHERE:
                raise InputError(f"generation_kwargs has {name!r}; use the field {_ELSEWHERE[name]}")
            if name == "do_sample":
                self._take_do_sample(value)
                continue
            if name in _PLAIN:
                plain, why = _PLAIN[name]
                if value != plain:
                    raise InputError(
                        f"generation_kwargs has {name}={value!r}; only {plain!r} is taken: {why}"
                    )
                continue
            if name not in _KWARGS:
                raise InputError(
                    f"generation_kwargs has the unknown key {name!r}; known are {', '.join(_KWARGS)}"
                )
            if getattr(self, name) not in (defaults[name], value):
                raise InputError(
                    f"{name} is {getattr(self, name)!r}, and {value!r} in generation_kwargs; give it in one place"
                )
            setattr(self, name, value)

    def _take_do_sample(self, value: Any) -> None:
        if value not in (True, False):
            raise InputError(f"generation_kwargs has do_sample={value!r}; it must be true or false")
        if not value:
            _logger.warning(
                "generation_kwargs has do_sample=False: the likeliest token is always taken, as with top_k=1. All "
                "completions of a prompt are equal then, and nothing can be learned from them"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken.

        This is the distribution of `top_k=1`, and it is scored as that.
        """
        return (
            isinstance(self.generation_kwargs, Mapping) and self.generation_kwargs.get("do_sample") is False
        )

    def check_filters(self, limit: int, *, interrupted: bool) -> None:
        """Check the fields.

        Args:
            limit: largest number of tokens of a completion.
            interrupted: whether completions are interrupted and continued (`max_thinking_length`).

        Raises:
            InputError: a value is outside its range, a grammar cannot be read, or two fields cannot be combined.
        """
        if not isinstance(self.logit_bias, Mapping | None):
            raise InputError(f'logit_bias={self.logit_bias!r}; it must be a mapping, such as {{"42": -1.5}}')
        sampling = Sampling(limit, **self.filter_values())
        if sampling.grammar is not None:
            (name,) = self._grammar_fields.values()
            try:
                check_grammar(sampling.grammar)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
        counting = self._counting_fields
        if interrupted and counting:
            raise InputError(
                f"{' and '.join(counting)} would start again after an interruption: leave max_thinking_length "
                f"or that out"
            )

    def check_several_calls(self, who: str) -> None:
        """Refuse settings that count the tokens of one call to the engine, for rollouts that may have several calls.

        Args:
            who: what makes several calls.

        Raises:
            InputError: such a setting is in force.
        """
        if names := self._counting_fields:
            raise InputError(
                f"{' and '.join(names)} would start again with each turn of a rollout that {who} continues; leave "
                f"{'it' if len(names) == 1 else 'them'} out (repetition_penalty counts all tokens before, in "
                f"every turn)"
            )

    @property
    def _counting_fields(self) -> list[str]:
        """The fields in force that count the tokens of one call to the engine."""
        values = self.filter_values()
        names = Sampling(max(values["min_tokens"], 1), **values).counting_fields
        # The field of a grammar says its kind.
        named = [
            f for name in names for f in (self._grammar_fields.values() if name == "grammar" else [name])
        ]
        return [*named, *(["bad_words"] if self.bad_words else [])]

    def filter_values(self) -> dict[str, Any]:
        """The fields of `Sampling`, except `bad_words`, whose ids only a tokenizer knows.

        Raises:
            InputError: a field has a value of another kind, or several grammars are given.
        """
        found: dict[str, Any] = {}
        for name, made in _MADE.items():
            try:
                found[name] = made(getattr(self, name))
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(f"{name}={getattr(self, name)!r:.80} cannot be used: {error}") from error
        return found | ({"top_k": 1} if self.is_greedy else {}) | {"grammar": self._grammar()}

    @property
    def _grammar_fields(self) -> dict[GrammarKind, str]:
        return {kind: name for kind, name in GRAMMAR_FIELDS.items() if getattr(self, name) is not None}

    def _grammar(self) -> Grammar | None:
        given = self._grammar_fields
        if len(given) > 1:
            raise InputError(f"{' and '.join(given.values())}: a completion can follow one of them only")
        for kind, name in given.items():
            value = getattr(self, name)
            try:
                return Grammar(kind, value if isinstance(value, str) else json.dumps(value))
            except (InputError, TypeError, ValueError) as error:
                raise InputError(f"{name}={value!r:.80}: {error}") from error
        return None


_INTERRUPTION = "\n\nThe time for thinking is over. I will now give my final answer.\n</think>\n\n"


@dataclass
class InterruptionFields:
    """The fields of forced-length interruptions (ScaleRL, arXiv 2510.13786)."""

    max_thinking_length: int | None = option(
        None,
        "Number of tokens after which a completion that still thinks is interrupted and continues to its "
        "answer; unset: never.",
        group="sampling",
        bounds=COUNT,
    )
    min_thinking_length: int | None = option(
        None,
        "If set, that number is drawn between this and max_thinking_length; unset: always max_thinking_length.",
        group="sampling",
        bounds=COUNT,
    )
    interruption: str = option(
        _INTERRUPTION,
        "Text that is inserted after such a completion's tokens, and not learned from; contains end_of_thinking.",
        group="sampling",
        only_with="thinking",
    )
    end_of_thinking: str = option(
        "</think>",
        "Text that ends the thinking of a completion; best a single token.",
        group="sampling",
        only_with="thinking",
    )

    def check_interruption(self, limit: int, stop: list[str]) -> None:
        """Check the fields.

        Args:
            limit: largest number of tokens of a completion.
            stop: strings that end a completion.

        Raises:
            InputError: a completion could not be interrupted, or could not continue after the interruption.
        """
        if self.max_thinking_length is None:
            if self.min_thinking_length is not None:
                raise InputError(
                    f"min_thinking_length={self.min_thinking_length} needs max_thinking_length beside it"
                )
            return
        check_bounds(self, {"min_thinking_length": Bounds(1, self.max_thinking_length)})
        if self.max_thinking_length >= limit:
            raise InputError(
                f"max_thinking_length={self.max_thinking_length} leaves nothing for an answer within the "
                f"{limit} tokens of a "
                "completion: lower it, or raise the limit"
            )
        if not self.end_of_thinking.strip():
            raise InputError(
                f"end_of_thinking={self.end_of_thinking!r}; it must be the text that ends thinking"
            )
        if self.end_of_thinking not in self.interruption:
            raise InputError(
                f"interruption={self.interruption!r} does not hold end_of_thinking={self.end_of_thinking!r}: "
                f"the completion "
                "would go on thinking"
            )
        for string in stop:
            if string in self.end_of_thinking:
                raise InputError(
                    f"stop_strings: {string!r} ends every completion where its thinking ends "
                    f"({self.end_of_thinking!r}); leave "
                    "it out, or leave max_thinking_length out"
                )


def interruption_of(config: OnlineConfig, tokenizer: PreTrainedTokenizerBase) -> Interruption | None:
    """The interruption of thinking, in token ids; None if thinking is never interrupted.

    Raises:
        InputError: the tokenizer makes no tokens, or an end token, from a field's text; or no tokens are left for an
            answer.
    """
    if config.max_thinking_length is None:
        return None
    ids = {}
    for name in ("interruption", "end_of_thinking"):
        text = getattr(config, name)
        ids[name] = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids[name] or tokenizer.eos_token_id in ids[name]:
            why = "an end token, and a completion ends there" if ids[name] else "no tokens"
            raise InputError(f"{name}={text!r}: the tokenizer makes {why}; give other text")
    found = Interruption(
        config.max_thinking_length, ids["interruption"], ids["end_of_thinking"], config.min_thinking_length
    )
    found.check_room(config.completion_limit)
    return found


def check_end_of_thinking(config: OnlineConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the fields that need a tokenizer, and tell the user if an end of thinking may be missed.

    Raises:
        InputError: a field's text gives no tokens or an end token, or no tokens are left for an answer.
    """
    found = interruption_of(config, tokenizer)
    if found is not None and len(found.end_ids) > 1:
        _logger.warning(
            f"end_of_thinking={config.end_of_thinking!r} is {len(found.end_ids)} tokens of this tokenizer; a "
            "completion that writes it with other tokens counts as still thinking"
        )
    if found is not None and not set(found.end_ids) <= set(config.allowed_token_ids or found.end_ids):
        _logger.warning(
            f"allowed_token_ids lacks end_of_thinking={config.end_of_thinking!r}: no completion ends its thinking, "
            "and every long one is interrupted (max_thinking_length)"
        )


def check_leaves_tokens(
    config: OnlineConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: Sequence[int]
) -> None:
    """Check what is banned against the model's vocabulary, and that a token is left to sample.

    Args:
        vocabulary: number of logits of the model.
        end_ids: the ids that end a completion.

    Raises:
        InputError: a field names a token that the model does not have, or fields together leave no token.
    """
    sampling, ends = sampling_of(config, tokenizer, end_ids), tuple(end_ids)
    sampling.check_vocabulary(vocabulary)
    Bans(sampling, vocabulary, ends, tokenizer.decode).check(
        lambda: GrammarCompiler(tokenizer, vocabulary, ends)
    )


def sampling_of(
    config: OnlineConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    banned_ids: Sequence[int] = (),
) -> Sampling:
    """The sampling distribution of a run.

    Args:
        end_ids: the ids that end a completion (`tokens/chat.py`).
        banned_ids: ids that must not be sampled, beside those that the config bans.

    Raises:
        InputError: a bad word has no tokens.
    """
    return Sampling(
        max_tokens=config.completion_limit,
        temperature=config.temperature,
        stop=tuple(config.stop_strings or ()),
        bad_words=(*bad_word_ids(config.bad_words or (), tokenizer), *((token,) for token in banned_ids)),
        end_ids=tuple(end_ids),
        **config.filter_values(),
    )


def bad_word_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """The ids of each bad word, at the beginning of a text and within it, by vLLM's rule.

    With a space before it, a word counts if the space changes its first token and not the number of its tokens.

    Raises:
        InputError: a word has no tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not plain:
            raise InputError(f"bad_words has {word!r}, which has no tokens")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(found)
