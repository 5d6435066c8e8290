"""The bets of the draws proof on which ids are sampled, whatever their probability.

An engine that never ends a completion, never repeats an id or leaves out a part of the vocabulary prefers neither
likely nor unlikely ids. So these bets are on classes of ids (`learn/id_classes.py`). A bet multiplies the odds of a
class. Every id of the class then has p × a, and every other id p × b, with a ÷ b the factor and one sum of 1: the bet
needs nothing but the class's mass under p. A class without mass, such as the end token before `min_tokens`, or with all
the mass, as where a grammar allows nothing else, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.learn.id_classes import (
    AGAIN,
    BLOCKS,
    BY_IDS,
    DRAWN,
    END,
    GIVEN,
    LAST,
    PAIR,
    REMAINDERS,
    ClassValues,
)

# A factor beyond 10 or below a tenth would let the rounding of a mass count more than a bet pays for it.
_NEVER = 0.1


@dataclass(frozen=True, slots=True)
class IdBet:
    """A bet on one class: what the engine does if it wins, and the reason, in the words of an error.

    Attributes:
        columns: the class, or several that have no id in common.
        factor: of its odds.
    """

    suspicion: str
    reason: str
    columns: tuple[int, ...]
    factor: float

    def log_ratios(self, classes: ClassValues) -> NDArray[np.float64]:
        """(N,) log(r ÷ p) of the sampled tokens."""
        mass, is_member = classes.masses[..., self.columns[0]], classes.members[..., self.columns[0]]
        for column in self.columns[1:]:
            mass, is_member = mass + classes.masses[..., column], is_member | classes.members[..., column]
        norms = np.log1p((self.factor - 1.0) * np.minimum(mass, 1.0))
        return np.where(is_member, np.log(self.factor), 0.0) - norms


# Of each class that follows from the ids before a token: what it is in words, what may be wrong, and the factors.
_OF_CONTEXT = {
    END: (
        "ends a completion",
        "something bans, masks or moves end tokens after the log-probs were computed",
        (_NEVER, 0.4, 0.7, 1.4, 2.5, 6.0),
    ),
    AGAIN: (
        "samples an id that the completion already has",
        "a repetition penalty or a ban of repetitions acts after the log-probs were computed",
        (_NEVER, 0.4, 0.75, 1.35, 2.5),
    ),
    GIVEN: (
        "samples an id of the context: of the prompt, or of what was inserted",
        "a penalty that counts the prompt acts after the log-probs were computed",
        (_NEVER, 0.4, 0.75, 1.35, 2.5),
    ),
    LAST: (
        "samples the last id again",
        "a ban of repetitions acts after the log-probs were computed",
        (_NEVER, 0.4, 2.5, 8.0),
    ),
    PAIR: (
        "samples the id that followed the last id before",
        "a ban of repeated n-grams acts after the log-probs were computed",
        (_NEVER, 0.4, 2.5, 8.0),
    ),
}
# A bet that a part is left out, and one that it is preferred.
_OF_PARTS = (0.25, 1.8)
_MASKED = (
    "a mask of ids acts after the log-probs were computed: of a grammar, of allowed ids, or of a shard of the "
    "vocabulary"
)


def bets_on_context() -> Iterator[tuple[str, IdBet]]:
    """The bets on classes that follow from the ids before a token, by name."""
    for name, (does, reason, factors) in _OF_CONTEXT.items():
        for factor in factors:
            often = (
                "too often" if factor > 1 else "never or hardly ever" if factor == _NEVER else "too rarely"
            )
            yield f"{name} x{factor}", IdBet(f"{often} {does}", reason, (BY_IDS.index(name),), factor)


def bets_on_parts() -> Iterator[tuple[str, IdBet]]:
    """The bets on parts of the vocabulary, by name: halves, quarters, eighths, and the smallest parts."""
    first = len(BY_IDS)
    for name, part, columns in _parts(first):
        for factor in _OF_PARTS:
            does = "prefers" if factor > 1 else "leaves out"
            suspicion = f"{does} a part of the vocabulary ({part})"
            yield f"{name} x{factor}", IdBet(suspicion, _MASKED, columns, factor)


def _parts(first: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, words and columns of each part. `first` is the column of the first block."""
    for count in (2, 4, 8, 16):
        times = BLOCKS // count
        for i in range(count):
            columns = range(first + i * times, first + (i + 1) * times)
            yield f"block {i}/{count}", f"block {i} of {count}, counted from 0", tuple(columns)
    first += BLOCKS
    for count in (2, 4, 8, 16):
        for i in range(count):
            columns = range(first + i, first + REMAINDERS, count)
            yield f"ids {i}/{count}", f"ids whose remainder by {count} is {i}", tuple(columns)
    first += REMAINDERS
    for i in range(DRAWN):
        yield f"drawn {i}", f"part {i} of {DRAWN} parts that the seed draws", (first + i,)
