"""The values per token are read-only arrays. They keep the given values exactly."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.group import Prompt
from lockstep.tokens.arrays import BadValues, cut, flags, joined, reals, whole_numbers

KEY = RequestKey("p", 0)
LENGTHS = st.lists(st.integers(0, 5), max_size=6)


def completion(**changes: Any) -> Completion:
    whole = Completion(KEY, (1, 2), (5, 6, 7), (-0.5, 0.0, -0.25), (3, 3, 4), "stop", (True, False, True))
    return replace(whole, **changes)


def sequence(**changes: Any) -> TrainingSequence:
    reals_of = ("behaviour_logps", "advantages", "old_logps", "entropies", "ref_logps", "values", "returns")
    own: dict[str, Any] = dict.fromkeys(reals_of, (-0.5, -0.25))
    own |= {"fresh": (True, False), "kept": (False, True), "sampled": (True, False, True)}
    return replace(TrainingSequence("p#0", (1, 2), (5, 6, 7), ()), **{**own, **changes})


@pytest.mark.parametrize(
    "made", [completion(), sequence(), GenerationRequest(KEY, [1, 2], Sampling(1), 0), Prompt("p", [1], "")]
)
def test_every_array_is_read_only_once_it_is_made(made: Any) -> None:
    arrays = [getattr(made, f.name) for f in fields(made) if isinstance(getattr(made, f.name), np.ndarray)]
    assert arrays
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_who_gave_an_array_cannot_change_it_afterwards() -> None:
    given_ids = np.array([5, 6, 7])
    made = completion(token_ids=given_ids)
    given_ids[0] = 99
    assert made.token_ids.tolist() == [5, 6, 7]
    # An array that is already read-only is not copied.
    assert completion(token_ids=made.token_ids).token_ids is made.token_ids


@given(st.lists(st.floats(width=32, allow_nan=False)), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_values_are_kept_exactly(numbers: list[float], whole: list[int]) -> None:
    assert list(map(str, reals(numbers).tolist())) == list(map(str, numbers))
    assert whole_numbers(whole).tolist() == whole


@pytest.mark.parametrize(
    "bad", [[None], [0.5, None], ["-0.5"], [[-0.5]], [[1], [2, 3]], "no", None, -0.5, [{}]]
)
def test_what_is_no_sequence_of_numbers_is_refused(bad: Any) -> None:
    with pytest.raises(BadValues):
        reals(bad)


@pytest.mark.parametrize("bad", [[1.0], [None], ["1"], [True], [2**63], [2**70], [[1]], 1, [1, 2.5]])
def test_what_is_no_sequence_of_integers_is_refused(bad: Any) -> None:
    with pytest.raises(BadValues):
        whole_numbers(bad)


@pytest.mark.parametrize("bad", [[1, 0], ["True"], [None], [0.0], True])
def test_what_is_no_sequence_of_booleans_is_refused(bad: Any) -> None:
    with pytest.raises(BadValues):
        flags(bad)


def test_a_number_beyond_float32_becomes_infinite_and_never_another_number() -> None:
    assert reals([-1e39]).tolist() == [-math.inf]


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (5, 6, 8)},
        {"token_ids": (5, 6)},
        {"logprobs": (-0.5, 0.0, -0.125)},
        {"logprobs": (-0.5, 0.0, math.nan)},
        {"weight_versions": (3, 3, 3)},
        {"sampled": None},
        {"sampled": (True, True, True)},
        {"finish_reason": "length"},
        {"key": RequestKey("p", 1)},
    ],
)
def test_completions_are_equal_where_all_of_their_fields_are(changes: dict[str, Any]) -> None:
    assert completion() == completion()
    assert completion(**changes) != completion()
    assert completion() != sequence()


@given(LENGTHS)
def test_what_was_joined_is_cut_into_the_same_parts(lengths: list[int]) -> None:
    parts = [whole_numbers(range(length)) for length in lengths]
    whole = joined(parts) if parts else whole_numbers([])
    assert [part.tolist() for part in cut(whole, lengths)] == [part.tolist() for part in parts]
    assert not whole.flags.writeable
    assert not any(part.flags.writeable for part in cut(whole, lengths))
    with pytest.raises(ValueError, match="cut into parts"):
        cut(whole, [*lengths, 1])
