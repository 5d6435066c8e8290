"""The part of a sampling distribution that follows from token ids alone: moves of logits, and bans.

Penalties and biases move logits, bans take ids away. The trainer computes this part again from the ids of whole
completions. The order of the steps is that of `contract/distribution.py`, which does the same for one token. Positions
are counted in sampled tokens: position t is that of the token after the first t sampled ones.

`RowRules` applies the rules to the rows of a pack, one chunk of whole logits at a time; with kept ids they are applied
to the logits of these ids alone. A row is what predicts a token: a node of the pack's tree, and the length of the
prompt, because branches of two prompts may share a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.contract.distribution import Distribution
from lockstep.contract.sampling import GrammarCompiler, Sampling
from lockstep.errors import InputError
from lockstep.learn.sequence import TrainingSequence
from lockstep.tokens.arrays import Flags, Ids, chosen, places_of
from lockstep.tokens.chat import embedding_rows, end_ids

# A banned id gets this logit. Its probability is exactly 0, and unlike −inf it leaves products finite.
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
        moved = moved - sampling.frequency_penalty * self.counts
        return moved - sampling.presence_penalty * (self.counts > 0)

    def slopes(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """(E,) derivative of each moved logit by the logit."""
        return torch.where(self.seen, self._factor(logits + self.bias, sampling), torch.ones_like(logits))

    def _factor(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        penalty = sampling.repetition_penalty
        return torch.where(logits > 0, 1.0 / penalty, penalty).to(logits.dtype)


@dataclass(frozen=True)
class IdRules:
    """Which penalties, biases and bans a run applies, by the ids so far.

    Args:
        vocabulary: V, the number of logits.
        end_ids: ids that end a completion (`tokens/chat.py`).
        grammars: compiles the grammar of `sampling`, if there is one.
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
        return sampling.repetition_penalty != 1.0 or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )

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
    def of_run(
        cls, sampling: Sampling, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> IdRules:
        """The rules of a run."""
        vocabulary, ends = embedding_rows(model), end_ids(model, tokenizer)
        grammars = GrammarCompiler(tokenizer, vocabulary, ends) if sampling.grammar is not None else None
        return cls(sampling, vocabulary, ends, grammars)

    def of(self, prompt_ids: Ids, completion_ids: Ids, sampled: Flags | None = None) -> CompletionRules:
        """The rules of one completion; `sampled` as in `CompletionRules`."""
        return CompletionRules(self, np.asarray(prompt_ids), np.asarray(completion_ids), sampled)


class CompletionRules:
    """The rules at every position of one completion.

    Args:
        prompt_ids: (P,) ids of the request's prompt.
        completion_ids: (C,) ids that the engine sampled, and the ids that were inserted between them.
        sampled: (C,) bool, whether each of `completion_ids` was sampled; None: true for all ids.
    """

    def __init__(
        self, rules: IdRules, prompt_ids: Ids, completion_ids: Ids, sampled: Flags | None = None
    ) -> None:
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
        counts, seen = self._counts(ids, positions), np.zeros(len(ids), dtype=bool)
        if self._sampling.repetition_penalty != 1.0:
            seen = (counts > 0) | np.isin(ids, self._prompt)
        return Moves(*map(torch.from_numpy, (self._biases(ids), seen, counts.astype(np.float32))))

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
        keys, first = self._keys, ids * (len(self._completion) + 1)
        return np.searchsorted(keys, first + self._places[positions]) - np.searchsorted(keys, first)

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


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of the whole logits of a chunk of R rows.

    Attributes:
        rows, ids: (E,) places of the moved logits.
        banned: (R, V) bool, the ids that cannot be sampled; None: no id is banned.
    """

    sampling: Sampling
    rows: torch.Tensor
    ids: torch.Tensor
    moves: Moves
    banned: torch.Tensor | None

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Change (R, V) logits in place. Returns the (E,) derivatives of the moved logits by the logits."""
        before = logits[self.rows, self.ids]
        logits[self.rows, self.ids] = self.moves.applied(before, self.sampling)
        if self.banned is not None:
            logits.masked_fill_(self.banned, BANNED)
        return self.moves.slopes(before, self.sampling)


class RowRules:
    """The rules for the rows of several completions.

    Args:
        owners: (R,) the completion of each row.
        positions: (R,) how many ids of that completion were sampled before the row's token.

    Attributes:
        support: (R,) number of ids that can be sampled in each row. A chunk's edits fill it in.
    """

    def __init__(
        self, rules: IdRules, sequences: tuple[TrainingSequence, ...], owners: Ids, positions: Ids
    ) -> None:
        self.rules = rules
        self._owners, self._positions = owners, positions
        self._completions = [completion_rules(rules, sequence) for sequence in sequences]
        self.support = torch.full((len(owners),), rules.vocabulary)

    def edits(self, start: int, end: int, device: torch.device) -> Edits:
        """The edits of the rows from `start` up to `end`, without `end`."""
        rows, ids, moves, banned = [], [], [], []
        for completion, places in self._by_completion(start, end):
            positions = self._positions[start + places]
            if self.rules.moves_logits:
                movable = completion.movable
                ids.append(np.tile(movable, len(places)))
                rows.append(np.repeat(places, len(movable)))
                moves.append(completion.moves(ids[-1], np.repeat(positions, len(movable))))
            if self.rules.bans_ids:
                banned.append((torch.from_numpy(places), completion.banned(positions)))
        mask = None
        if banned:
            mask = torch.empty(end - start, self.rules.vocabulary, dtype=torch.bool)
            for where, part in banned:
                mask[where] = part
            self.support[start:end] = self.rules.vocabulary - mask.sum(1)
            mask = mask.to(device)
        moved = joined_moves(moves).to(device)
        return Edits(self.rules.sampling, _tensor(rows, device), _tensor(ids, device), moved, mask)

    def _by_completion(self, start: int, end: int) -> Iterator[tuple[CompletionRules, Ids]]:
        """Yield each completion with its rows between `start` and `end`, counted from `start`."""
        owners = self._owners[start:end]
        for owner in np.unique(owners):
            yield self._completions[owner], np.flatnonzero(owners == owner)


def completion_rules(rules: IdRules, sequence: TrainingSequence) -> CompletionRules:
    """The rules of a sequence's completion. Ids that were inserted are refused where a rule counts the sampled ones."""
    inserted = sequence.sampled is not None and not sequence.sampled.all()
    if inserted and (names := rules.sampling.counting_fields):
        raise InputError(
            f"completion {sequence.name} has ids that were not sampled; {' and '.join(names)} can be used "
            "with completions of one call only: leave them out of runs with tools or interruptions"
        )
    return rules.of(sequence.prompt_ids, sequence.completion_ids, sequence.sampled)


def moves_of_kept(rules: IdRules, sequences: tuple[TrainingSequence, ...], device: torch.device) -> Moves:
    """(M,) moves of the kept ids of several completions, set after set."""
    found = []
    for sequence in sequences:
        assert sequence.kept_ids is not None
        completion, kept = completion_rules(rules, sequence), sequence.kept_ids
        found.append(completion.moves(kept.ids.astype(np.int64), kept.tokens))
    return joined_moves(found).to(device)


def joined_moves(parts: list[Moves]) -> Moves:
    """The moves of all parts, in order."""
    if not parts:
        return Moves(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0))
    return Moves(*(torch.cat([getattr(part, name) for part in parts]) for name in ("bias", "seen", "counts")))


def _tensor(parts: list[Ids], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *parts])).to(device)
