"""The ids that a sampling filter (top-k, top-p, min-p) of the engine kept for each sampled token.

An engine adds them to its completions. The trainer does not compute the filter itself, because rounding could keep an id on one
machine and remove it on another. Instead it scores each sampled token among the engine's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.tokens.arrays import ArrayFields, BadValues, Flags, Ids, SmallIds, joined, small_ids, whole_numbers


@dataclass(frozen=True, slots=True, eq=False)
class KeptIds(ArrayFields):
    """One set of token ids for each of N sampled tokens. The sets are stored one after the other.

    Its arrays are read-only. The constructor accepts any sequence of integers.

    Attributes:
        ids: (M,) int32 the ids of all sets, ascending within each set.
        ends: (N,) int64 the position in `ids` at which each set ends. The first set begins at 0.

    Raises:
        BadValues: a value is not an integer, the ends decrease, or the last end is not M.
    """

    ids: SmallIds
    ends: Ids

    def __post_init__(self) -> None:
        self._set("ids", small_ids(self.ids))
        self._set("ends", whole_numbers(self.ends))
        last = int(self.ends[-1]) if len(self.ends) else 0
        if last != len(self.ids) or (self.sizes < 0).any():
            raise BadValues(f"{len(self.ids)} kept ids do not fit {len(self.ends)} sets")

    def __len__(self) -> int:
        """N: number of sets."""
        return len(self.ends)

    @property
    def sizes(self) -> Ids:
        """(N,) number of ids in each set."""
        return np.diff(self.ends, prepend=0)

    @property
    def tokens(self) -> Ids:
        """(M,) for each id, the index of the token (from 0 to N - 1) to whose set it belongs."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def part(self, start: int, end: int) -> KeptIds:
        """The sets of the tokens from `start` up to `end`, without `end`."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[end - 1]) if end > start else first
        return KeptIds(self.ids[first:last], self.ends[start:end] - first)

    def where(self, chosen: Flags) -> KeptIds:
        """The sets of the tokens at which a mask over the N tokens is true."""
        return KeptIds(self.ids[np.repeat(chosen, self.sizes)], np.cumsum(self.sizes[chosen]))


def joined_kept_ids(parts: Sequence[KeptIds]) -> KeptIds:
    """The sets of all parts, in order. There must be at least one part."""
    offsets = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
    return KeptIds(
        joined([part.ids for part in parts]),
        joined([part.ends + offset for part, offset in zip(parts, offsets.tolist(), strict=True)]),
    )
