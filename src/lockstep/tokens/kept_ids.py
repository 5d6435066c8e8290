"""The ids that a filter of sampling (top-k, top-p, min-p) kept for each token, as the engine that sampled them computed the filter.

An engine puts them into its completions. The trainer scores each sampled token among these ids, because rounding can put an id into
the set on one machine and out of it on another.
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
        ends: (N,) int64 where each set ends in `ids`. The first set begins at 0.

    Raises:
        BadValues: a value is not an integer, the ends fall, or the last end is not M.
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
        """(M,) the token, from 0 to N - 1, to whose set each id belongs."""
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
