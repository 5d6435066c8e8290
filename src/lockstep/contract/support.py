"""Whether the settings of a request leave a token to sample, and which of them leave none.

Bans follow from ids alone, so that a walk over random ids finds places without a token before a model is loaded. An
engine that comes to such a place names it in the same words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lockstep.contract.distribution import banned_ids
from lockstep.contract.sampling import GRAMMAR_FIELDS, GrammarCompiler, Sampling
from lockstep.errors import InputError
from lockstep.tokens.arrays import Flags

# How many completions of how many tokens are drawn, and the end of a text that an error quotes.
_WALKS, _STEPS, _QUOTED = 16, 32, 60


@dataclass(frozen=True, slots=True)
class Bans:
    """What bans ids of a completion, whatever the logits are.

    Attributes:
        vocabulary: number of logits.
        end_ids: ids that end a completion.
        decode: gives the text of ids, with special tokens; None: an error counts the tokens.
    """

    sampling: Sampling
    vocabulary: int
    end_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None = None

    def check(self, grammars: Callable[[], GrammarCompiler]) -> None:
        """Draw completions of random ids.

        Args:
            grammars: makes the compiler of the grammar, if there is one.

        Raises:
            InputError: a completion comes to a place where no token can be sampled.
        """
        if not self._can_ban_all:
            return
        own, draw = self.sampling, random.Random(0)
        compiler = grammars() if own.grammar is not None else None
        # Without both, a later place has every token of the first one.
        several = compiler is not None or any(len(word) > 1 for word in own.bad_words)
        for _ in range(_WALKS if several else 1):
            state = compiler.start(own.grammar) if compiler is not None and own.grammar is not None else None
            ids: list[int] = []
            while len(ids) < min(own.max_tokens, _STEPS if several else 1) and not self._has_ended(ids):
                mask = None if state is None else state.mask()
                left = np.flatnonzero(self._left(own, ids, mask))
                if not len(left):
                    raise self._error(ids, mask)
                ids.append(int(left[draw.randrange(len(left))]))
                if state is not None:
                    state.accept(ids[-1])

    def empty_place(self, ids: Sequence[int], mask: torch.Tensor | None, prompt_id: str) -> InputError | None:
        """The error of an engine that finds no token after these ids; None if there is one.

        Args:
            mask: (1, ⌈V / 32⌉) the ids that the grammar allows there.
            prompt_id: the prompt of the completion.
        """
        if self._left(self.sampling, ids, mask).any():
            return None
        return self._error(ids, mask, f"prompt {prompt_id}: ")

    def empty_place_after(
        self, ids: Sequence[int], prompt_id: str, grammars: Callable[[], GrammarCompiler]
    ) -> InputError | None:
        """`empty_place`, with the mask of the grammar after these ids."""
        if self.sampling.grammar is None:
            return self.empty_place(ids, None, prompt_id)
        state = grammars().start(self.sampling.grammar)
        for token in ids:
            state.accept(token)
        return self.empty_place(ids, state.mask(), prompt_id)

    @property
    def _can_ban_all(self) -> bool:
        """Whether there may be a place where all ids are banned. A bad word bans one id at a time."""
        own = self.sampling
        most = self.vocabulary if own.allowed_token_ids is None else len(own.allowed_token_ids)
        ends = self.end_ids if own.min_tokens else ()
        return own.grammar is not None or most <= len({*(word[-1] for word in own.bad_words), *ends})

    def _has_ended(self, ids: Sequence[int]) -> bool:
        if ids and ids[-1] in self.end_ids:
            return True
        is_open = not self.sampling.stop or self.decode is None or len(ids) <= self.sampling.min_tokens
        return not is_open and any(stop in self.decode(ids) for stop in self.sampling.stop)  # type: ignore[misc]

    def _left(self, sampling: Sampling, ids: Sequence[int], mask: torch.Tensor | None) -> Flags:
        """(V,) bool, the ids that can be sampled next: those that `shaped_logits` leaves above −inf."""
        left = np.ones(self.vocabulary, dtype=bool)
        if mask is not None:
            packed = mask[0].numpy().view(np.uint8)
            left = np.unpackbits(packed, count=self.vocabulary, bitorder="little").view(bool)
        if sampling.allowed_token_ids is not None:
            allowed = np.zeros_like(left)
            allowed[list(sampling.allowed_token_ids)] = True
            left &= allowed
        left[banned_ids(sampling, ids)] = False
        if len(ids) < sampling.min_tokens:
            ends = list(self.end_ids)
            before = left[ends]
            left[ends] = False
            if mask is not None and not left.any():
                left[ends] = before
        return left

    def _error(self, ids: Sequence[int], mask: torch.Tensor | None, of: str = "") -> InputError:
        place = "at the beginning of a completion"
        if ids:
            text = "" if self.decode is None else self.decode(ids)
            place = f"after {text[-_QUOTED:]!r}" if text else f"after {len(ids)} tokens"
        names = [*self._blamed(ids, mask)]
        verb = "leave" if len(names) > 1 or names == ["bad_words"] else "leaves"
        advice = self._advice(ids, mask, names)
        return InputError(f"{of}{' and '.join(names)} {verb} no token to sample {place}: {advice}")

    def _blamed(self, ids: Sequence[int], mask: torch.Tensor | None) -> Iterator[str]:
        """The settings of which each bans a token that the others leave; if there is none, all that ban tokens."""
        own, grammar = self.sampling, self._grammar_field
        without = {
            grammar: (own, None),
            "allowed_token_ids": (replace(own, allowed_token_ids=None), mask),
            "bad_words": (replace(own, bad_words=()), mask),
            "min_tokens": (replace(own, min_tokens=0), mask),
        }
        in_force = {
            grammar: mask is not None,
            "allowed_token_ids": own.allowed_token_ids is not None,
            "bad_words": bool(own.bad_words),
            "min_tokens": len(ids) < own.min_tokens,
        }
        given = [name for name, is_on in in_force.items() if is_on]
        yield from [
            name for name in given if self._left(without[name][0], ids, without[name][1]).any()
        ] or given

    @property
    def _grammar_field(self) -> str:
        return "" if self.sampling.grammar is None else GRAMMAR_FIELDS[self.sampling.grammar.kind]

    def _advice(self, ids: Sequence[int], mask: torch.Tensor | None, names: Sequence[str]) -> str:
        ends, plain = list(self.end_ids), Sampling(self.sampling.max_tokens)
        lacks_ends = "allowed_token_ids" in names and not set(ends) & set(
            self.sampling.allowed_token_ids or ()
        )
        if lacks_ends and mask is not None and self._left(plain, ids, mask)[ends].any():
            return f"add the end token {ends[0]} to allowed_token_ids, because the completion may end there"
        if "min_tokens" in names:
            return "lower min_tokens, or allow a token that does not end the completion"
        return "change " + ("one of them" if len(names) > 1 else "it")
