"""Sets of kept ids: cutting, choosing and joining change no set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens.arrays import BadValues, KeptIds, joined_kept_ids

SETS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4).map(sorted), max_size=6)


def kept(sets: list[list[int]]) -> KeptIds:
    return KeptIds([i for s in sets for i in s], np.cumsum([len(s) for s in sets], dtype=np.int64))


def sets_of(found: KeptIds) -> list[list[int]]:
    return [found.part(i, i + 1).ids.tolist() for i in range(len(found))]


@given(SETS, st.data())
def test_parts_and_choices_of_sets_are_those_of_the_lists(sets: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(sets)))
    end = data.draw(st.integers(start, len(sets)))
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(sets), max_size=len(sets))), dtype=np.bool_
    )
    assert sets_of(kept(sets)) == sets
    assert kept(sets).part(start, end) == kept(sets[start:end])
    assert kept(sets).where(mask) == kept([s for s, chosen in zip(sets, mask, strict=True) if chosen])
    assert joined_kept_ids([kept(sets[:start]), kept(sets[start:])]) == kept(sets)
    assert kept(sets).tokens.tolist() == [place for place, s in enumerate(sets) for _ in s]


@pytest.mark.parametrize(
    ("ids", "ends"), [([1, 2], [1]), ([1], [1, 0]), ([1, 2], [2, 1]), ([2**31], [1]), ([0.5], [1])]
)
def test_ends_that_do_not_fit_the_ids_are_refused(ids: list[int], ends: list[int]) -> None:
    with pytest.raises(BadValues):
        KeptIds(ids, ends)
