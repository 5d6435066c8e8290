"""Classes of ids at each sampled token, and how likely the token's own distribution makes them.

The draws proof bets on how often a token is of a class. Some classes follow from the ids before the token: the ids that
the completion has already, the last id. The others are fixed parts of the vocabulary. No class depends on the token
itself or on a later one.

What follows from ids is computed on the host, before the forward. The masses are sums over rows of probabilities, which
are in memory anyway. A part of the vocabulary is a reshape of a row, so no row is copied and no order of ids is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.devices import sent
from lockstep.learn.sequence import TrainingSequence
from lockstep.tokens.arrays import Flags, Ids

# Classes that follow from the ids before a token.
END, AGAIN, GIVEN, LAST, PAIR = BY_IDS = ("end", "again", "given", "last", "pair")
# Number of parts of the vocabulary, of each kind.
BLOCKS, REMAINDERS, DRAWN = 16, 16, 32
CLASSES = len(BY_IDS) + BLOCKS + REMAINDERS + DRAWN
# How many ids before a token are looked at.
WINDOW = 128
# The classes of the window, in the order of their bits.
_OF_WINDOW = (AGAIN, GIVEN, LAST, PAIR)


@dataclass(frozen=True)
class Classes:
    """Which classes of ids there are.

    `BY_IDS` are the ids that end a completion; among the last `WINDOW` ids before the token, those that were sampled,
    those that were not, and the last one; and the ids that have followed the last id before. After these come equal
    parts of the vocabulary: blocks of neighbours, ids with equal remainders by 16, and ids with equal remainders by a
    number that the run's seed draws.

    Attributes:
        end_ids: ids that end a completion.
        seed: of the run.
        vocabulary: V, the number of ids. Where whole rows of probabilities are in memory, it is their length.
    """

    end_ids: tuple[int, ...] = ()
    seed: int = 0
    vocabulary: int = 0

    @cached_property
    def divisor(self) -> int:
        """The drawn number, an odd one. Remainders from `DRAWN` on are joined with the first ones."""
        return DRAWN + 1 + 2 * int(np.random.default_rng((self.seed, 3)).integers(DRAWN // 2))

    def numbers(self, ids: Ids, vocabulary: int) -> NDArray[np.int64]:
        """(3, N) number of each id's block, remainder and drawn part, counted over all parts."""
        block = ids // -(-vocabulary // BLOCKS)
        return np.stack([block, BLOCKS + ids % REMAINDERS, BLOCKS + REMAINDERS + ids % self.divisor % DRAWN])

    def masses(self, p: torch.Tensor) -> torch.Tensor:
        """(n, parts) mass of each part of the vocabulary in (n, V) distributions."""
        count, vocabulary = p.shape
        width, divisor = -(-vocabulary // BLOCKS), self.divisor
        blocks, whole = p.new_zeros(count, BLOCKS), vocabulary // width
        blocks[:, :whole] = p[:, : whole * width].unflatten(1, (whole, width)).sum(-1)
        if whole < BLOCKS:
            blocks[:, whole] = p[:, whole * width :].sum(-1)
        drawn = _by_remainder(p, divisor)
        drawn[:, : divisor - DRAWN] += drawn[:, DRAWN:]
        return torch.cat([blocks, _by_remainder(p, REMAINDERS), drawn[:, :DRAWN]], 1)


def _by_remainder(p: torch.Tensor, divisor: int) -> torch.Tensor:
    """(n, divisor) mass of the ids of each remainder."""
    turns = p.shape[1] // divisor
    found = p[:, : turns * divisor].unflatten(1, (turns, divisor)).sum(1)
    rest = p[:, turns * divisor :]
    found[:, : rest.shape[1]] += rest
    return found


@dataclass(frozen=True, slots=True)
class ClassValues:
    """The classes of N tokens.

    Attributes:
        masses: (N, classes) how likely the trainer's distribution of each token makes its classes.
        members: (N, classes) bool, whether the token is of each class.
        first: (N,) bool, whether no sampled id stands directly before the token.
        places: (N,) number of sampled ids before the token in its completion.
    """

    masses: NDArray[np.float64]
    members: Flags
    first: Flags
    places: Ids

    def part(self, tokens: slice | Ids) -> ClassValues:
        """The classes of some tokens."""
        return ClassValues(self.masses[tokens], self.members[tokens], self.first[tokens], self.places[tokens])


class TokenClasses:
    """The classes of the N sampled tokens of some sequences, whose masses the forward fills in, each once.

    Attributes:
        masses: (N, classes) float32; NaN until they are known.
        vocabulary: number of ids.
    """

    def __init__(
        self, classes: Classes, sequences: Sequence[TrainingSequence], device: torch.device | str = "cpu"
    ) -> None:
        self._classes = classes
        found = [_recent(s) for s in sequences]
        window, marks, first, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
        self._ids = np.concatenate([s.sampled_ids for s in sequences])
        self._window, self._marks, self._first, self._places = window, marks, first, places
        self._window_there, self._marks_there = (sent(torch.from_numpy(a), device) for a in (window, marks))
        self._ends = sent(torch.tensor(classes.end_ids, dtype=torch.long), device)
        self._bits = sent(1 << torch.arange(len(_OF_WINDOW), dtype=torch.uint8), device)
        self.vocabulary = classes.vocabulary
        self.masses = torch.full((len(window), CLASSES), torch.nan, device=device)

    def fill(self, tokens: torch.Tensor, p: torch.Tensor) -> None:
        """Fill in the masses of (n,) tokens from their (n, V) distributions."""
        self.vocabulary = p.shape[1]
        known, window = self._marks_there[tokens], self._window_there[tokens].long()
        # An id of the prompt may have no logit, as that of a picture's placeholder has none in some models.
        of_window = p.gather(1, window.clamp(max=p.shape[1] - 1)) * (window < p.shape[1])
        sums = [p[:, self._ends].sum(-1)]
        sums += [(of_window * ((known & bit) > 0)).sum(-1) for bit in self._bits]
        self.masses[tokens] = torch.cat([torch.stack(sums, 1), self._classes.masses(p)], 1).to(self.masses)

    def values(self, masses: torch.Tensor) -> ClassValues:
        """The classes, on the host, after the forward. `masses` are those of this object, on the host."""
        rows = np.arange(len(self._ids))
        members = np.zeros((len(rows), CLASSES), dtype=bool)
        members[:, 0] = np.isin(self._ids, self._classes.end_ids)
        is_own = self._window == self._ids[:, None]
        for column in range(len(_OF_WINDOW)):
            members[:, 1 + column] = (is_own & ((self._marks >> column & 1) > 0)).any(1)
        for numbers in self._classes.numbers(self._ids, self.vocabulary):
            members[rows, len(BY_IDS) + numbers] = True
        return ClassValues(masses.double().numpy().clip(0.0, 1.0), members, self._first, self._places)


def _recent(sequence: TrainingSequence) -> tuple[NDArray[np.int32], NDArray[np.uint8], Flags, Ids]:
    """The window before each of N sampled tokens.

    Returns:
        (N, WINDOW) ids, (N, WINDOW) their classes, one bit each, (N,) `first` and (N,) `places`. Of equal ids in a
        class the last one has the bit, so that a sum over the class counts an id once.
    """
    path = np.concatenate([sequence.prompt_ids, sequence.completion_ids])
    start, count = len(sequence.prompt_ids), len(sequence.completion_ids)
    sampled = np.zeros(len(path), dtype=bool)
    sampled[start:] = True if sequence.sampled is None else sequence.sampled
    before = np.concatenate([path[:1], path[:-1]])
    again, given = _next(path, sampled), _next(path, ~sampled)
    # Pairs of ids that follow each other.
    pair = _next(before * (int(path.max()) + 1) + path, np.arange(len(path)) > 0)
    ends = start + np.flatnonzero(sampled[start:])
    places = ends[:, None] - WINDOW + np.arange(WINDOW)
    is_there, places = places >= 0, places.clip(0)
    limit = ends[:, None]
    follows = (before[places] == path[limit - 1]) & (places > 0)
    bits = (
        sampled[places] & (again[places] >= limit),
        ~sampled[places] & (given[places] >= limit),
        places == limit - 1,
        follows & (pair[places] >= limit),
    )
    marks = sum((own & is_there).astype(np.uint8) << bit for bit, own in enumerate(bits))
    assert isinstance(marks, np.ndarray)
    window = path[places].astype(np.int32)
    return window, marks, ~sampled[ends - 1], np.arange(len(ends)) if count else ends


def _next(keys: Ids, among: Flags) -> Ids:
    """(L,) the next place among the marked ones that has the same key; L if there is none."""
    found = np.full(len(keys), len(keys), dtype=np.int64)
    places = np.flatnonzero(among)
    places = places[np.argsort(keys[places], kind="stable")]
    same = keys[places[1:]] == keys[places[:-1]]
    found[places[:-1][same]] = places[1:][same]
    return found
