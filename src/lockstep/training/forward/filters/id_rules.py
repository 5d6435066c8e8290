"""The part of a sampling distribution that follows from token ids alone: penalties and biases move logits, bans take ids away.

The trainer computes this part again from the ids of whole completions, and applies it to a pack. The order of the
steps is that of `contract/filters.py`, which does the same for one token: first the bans (grammar, allowed ids, bad
words, end tokens before `min_tokens`), then the biases, then the penalties. Positions are counted in sampled tokens:
position t is that of the token after the first t sampled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.contract.distribution import Distribution
from lockstep.contract.grammars import GrammarCompiler
from lockstep.contract.sampling import Sampling
from lockstep.tokens.arrays import Flags, Ids, chosen, places_of
from lockstep.tokens.end import end_ids
from lockstep.tokens.tokenizer import embedding_rows

# A banned id gets this logit. Its probability is exactly 0, and products with it stay finite, which they would not with −inf.
BANNED = -1e30


def is_banned(logits: torch.Tensor) -> torch.Tensor:
    """Whether logits, also after their division by the temperature, are those of banned ids."""
    return logits < BANNED / 10


@dataclass(frozen=True, slots=True)
class Moves:
    """How the logits of E pairs of a position and an id are moved.

    Attributes:
        bias: (E,) float32, added to the logit.
        seen: (E,) bool, whether the prompt or the completion before the position contains the id.
        counts: (E,) float32, how often the completion before the position contains the id.
    """

    bias: torch.Tensor
    seen: torch.Tensor
    counts: torch.Tensor

    def to(self, device: torch.device) -> Moves:
        """The same on another device."""
        return Moves(self.bias.to(device), self.seen.to(device), self.counts.to(device))

    def applied(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """(E,) moved logits."""
        moved = logits + self.bias
        moved = torch.where(self.seen, moved * self._factor(moved, sampling), moved)
        return moved - sampling.frequency_penalty * self.counts - sampling.presence_penalty * (self.counts > 0)

    def slopes(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """(E,) derivative of each moved logit by the logit."""
        return torch.where(self.seen, self._factor(logits + self.bias, sampling), torch.ones_like(logits))

    def _factor(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        penalty = sampling.repetition_penalty
        return torch.where(logits > 0, 1.0 / penalty, penalty).to(logits.dtype)


@dataclass(frozen=True)
class IdRules:
    """The rules of a run.

    Args:
        sampling: the distribution of every request.
        vocabulary: V, the number of logits.
        end_ids: ids that end a completion (`tokens/end.py`).
        grammars: compiles the grammar of `sampling`. It is needed only if there is one.
    """

    sampling: Sampling
    vocabulary: int
    end_ids: tuple[int, ...] = ()
    grammars: GrammarCompiler | None = None

    @property
    def distribution(self) -> Distribution:
        """The same rules, for a plain row of logits."""
        return Distribution(self.sampling, self.end_ids, self.grammars)

    @property
    def moves_logits(self) -> bool:
        """Whether a penalty or a bias is in force."""
        return self.has_penalties or bool(self.sampling.logit_bias)

    @property
    def has_penalties(self) -> bool:
        sampling = self.sampling
        return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)

    @property
    def bans_ids(self) -> bool:
        """Whether an id can be banned without regard to the logits."""
        sampling = self.sampling
        given = sampling.bad_words, sampling.min_tokens, sampling.grammar
        return sampling.allowed_token_ids is not None or any(given)

    @property
    def are_neutral(self) -> bool:
        """Whether the rules change nothing."""
        return not self.moves_logits and not self.bans_ids

    @cached_property
    def always_banned(self) -> torch.Tensor:
        """(V,) bool, the ids that are banned at every position."""
        banned = torch.zeros(self.vocabulary, dtype=torch.bool)
        if self.sampling.allowed_token_ids is not None:
            banned[:] = True
            banned[[i for i in self.sampling.allowed_token_ids if i < self.vocabulary]] = False
        banned[[word[0] for word in self.sampling.bad_words if len(word) == 1]] = True
        return banned

    @classmethod
    def of_run(cls, sampling: Sampling, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> IdRules:
        """The rules of a run.

        Raises:
            InputError: there is a grammar, and xgrammar is not installed.
        """
        vocabulary, ends = embedding_rows(model), end_ids(model, tokenizer)
        grammars = GrammarCompiler(tokenizer, vocabulary, ends) if sampling.grammar is not None else None
        return cls(sampling, vocabulary, ends, grammars)

    def of(self, prompt_ids: Ids, completion_ids: Ids, sampled: Flags | None = None) -> CompletionRules:
        """The rules of one completion.

        Args:
            sampled: (C,) bool, whether each of `completion_ids` was sampled; None: true for all ids.
        """
        return CompletionRules(self, np.asarray(prompt_ids), np.asarray(completion_ids), sampled)


class CompletionRules:
    """The rules at every position of one completion.

    Args:
        prompt_ids: (P,) ids of the request's prompt.
        completion_ids: (C,) ids that the engine sampled, and the ids that were inserted between them.
        sampled: (C,) bool, whether each of `completion_ids` was sampled; None: true for all ids.
    """

    def __init__(self, rules: IdRules, prompt_ids: Ids, completion_ids: Ids, sampled: Flags | None = None) -> None:
        self.rules, self._sampling = rules, rules.sampling
        self._prompt, self._completion = prompt_ids, completion_ids
        self._sampled = chosen(completion_ids, sampled)
        self._places = places_of(sampled, len(completion_ids))

    @cached_property
    def movable(self) -> Ids:
        """(U,) ids whose logits may be moved at some position, ascending."""
        parts = [np.array([i for i, _ in self._sampling.logit_bias], dtype=np.int64)]
        if self.rules.has_penalties:
            parts.append(self._completion)
        if self._sampling.repetition_penalty != 1.0:
            parts.append(self._prompt)
        return np.unique(np.concatenate(parts))

    def moves(self, ids: Ids, positions: Ids) -> Moves:
        """Moves of E pairs of an id and a position."""
        counts = self._counts(ids, positions)
        seen = counts > 0 if self._sampling.repetition_penalty != 1.0 else np.zeros(len(ids), dtype=bool)
        if self._sampling.repetition_penalty != 1.0:
            seen |= np.isin(ids, self._prompt)
        return Moves(
            torch.from_numpy(self._biases(ids)),
            torch.from_numpy(seen),
            torch.from_numpy(counts.astype(np.float32)),
        )

    def _biases(self, ids: Ids) -> NDArray[np.float32]:
        found = np.zeros(len(ids), dtype=np.float32)
        for token, bias in self._sampling.logit_bias:
            found[ids == token] = bias
        return found

    def _counts(self, ids: Ids, positions: Ids) -> Ids:
        """(E,) how often each id occurs in the completion before each position, among sampled and inserted ids."""
        if not self.rules.has_penalties:
            return np.zeros(len(ids), dtype=np.int64)
        # Sorted by id and then by place, the occurrences of an id before a position are neighbours.
        width, keys = len(self._completion) + 1, self._keys
        return np.searchsorted(keys, ids * width + self._places[positions]) - np.searchsorted(keys, ids * width)

    @cached_property
    def _keys(self) -> Ids:
        return np.sort(self._completion * (len(self._completion) + 1) + np.arange(len(self._completion)))

    def bans(self, positions: Ids) -> tuple[Ids, Ids]:
        """Bans by bad words of several ids: indices into `positions`, and the id that is banned there."""
        rows, ids = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for word in self._sampling.bad_words:
            if len(word) > 1:
                found = np.flatnonzero(np.isin(positions, self._ends_of(word[:-1])))
                rows.append(found)
                ids.append(np.full(len(found), word[-1]))
        return np.concatenate(rows), np.concatenate(ids)

    def _ends_of(self, prefix: Sequence[int]) -> Ids:
        """The positions just after each occurrence of `prefix` among the sampled ids."""
        if len(prefix) > len(self._sampled):
            return np.empty(0, dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(self._sampled, len(prefix))
        return np.flatnonzero((windows == np.asarray(prefix)).all(1)) + len(prefix)

    def too_early(self, positions: Ids) -> Flags:
        """(n,) whether a completion must not end at each position, because it has fewer than `min_tokens` tokens."""
        return positions < self._sampling.min_tokens

    @cached_property
    def allowed_bits(self) -> torch.Tensor | None:
        """(C, ⌈V / 32⌉) int32 mask of the ids that the grammar allows at each position; None without a grammar."""
        if self._sampling.grammar is None:
            return None
        assert self.rules.grammars is not None
        return self.rules.grammars.masks(self._sampling.grammar, self._sampled.tolist())

    def banned(self, positions: Ids) -> torch.Tensor:
        """(n, V) bool, the ids that cannot be sampled at each position, before any filter looks at the logits."""
        banned = self.rules.always_banned.repeat(len(positions), 1)
        rows, ids = self.bans(positions)
        banned[torch.from_numpy(rows), torch.from_numpy(ids)] = True
        if self.allowed_bits is not None:
            banned |= ~unpacked(self.allowed_bits[torch.from_numpy(positions)], self.rules.vocabulary)
        early = torch.from_numpy(np.flatnonzero(self.too_early(positions)))
        if len(early):
            self._ban_ends(banned, early)
        return banned

    def _ban_ends(self, banned: torch.Tensor, early: torch.Tensor) -> None:
        """Ban the end tokens in the rows `early`. As in vLLM they stay where a grammar allows nothing else."""
        places = early[:, None], torch.tensor(self.rules.end_ids)
        before = banned[places]
        banned[places] = True
        if self._sampling.grammar is not None:
            nothing_left = banned[early].all(1)
            banned[places] = torch.where(nothing_left[:, None], before, banned[places])


def unpacked(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(n, V) bool from (n, ⌈V / 32⌉) packed bits, the lowest bit first."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(torch.uint8)[:, :, None] & powers).bool().flatten(1)[:, :vocabulary]
