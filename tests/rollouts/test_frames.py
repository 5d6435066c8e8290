"""A rank receives exactly the bits that another rank sent. Incomplete or malformed bytes are refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn

from lockstep.errors import LockstepError
from lockstep.rollouts.wire import decode, encode

DTYPES = st.sampled_from([np.int64, np.float32, np.float64, np.bool_])
# The arrays include NaNs with any bits, infinities, −0, and denormals.
ARRAYS = DTYPES.flatmap(
    lambda dtype: drawn.arrays(dtype, drawn.array_shapes(min_dims=1, max_dims=2, min_side=0))
)
# Keys that look like the mark of an encoded array.
NAMES = st.sampled_from(["array", "array'", "array''", "value", "tag", "", "\u2028"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | NAMES
VALUES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(), inner, max_size=4),
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        alike = isinstance(other, np.ndarray) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(VALUES)
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_arrays_arrive_read_only_and_numbers_that_json_has_no_word_for_arrive() -> None:
    found = decode(encode({"x": np.array([-0.0, np.nan, -np.inf], np.float32), "y": [float("nan"), -0.0]}))
    assert found["x"].tobytes() == np.array([-0.0, np.nan, -np.inf], np.float32).tobytes()
    assert repr(found["y"]) == "[nan, -0.0]"
    with pytest.raises(ValueError, match="read-only"):
        found["x"][0] = 1.0


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), np.array(["a"]), np.array([{}]), np.array([1], np.uint8), 1j]
)
def test_what_is_neither_json_nor_an_array_of_numbers_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode([value])


def framed(arrays: Any, value: Any, data: bytes, **more: Any) -> bytes:
    header = json.dumps({"tag": "array", "arrays": arrays, "value": value, **more}).encode()
    return len(header).to_bytes(8, "little") + header + b" " * (-len(header) % 8) + data


def test_the_frames_below_are_right_but_for_what_is_changed() -> None:
    assert decode(framed([["int64", [1], 0]], {"array": 0}, bytes(8))).tolist() == [0]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 40,
        pickle.dumps([1, 2]),
        framed([["object", [1], 0]], {"array": 0}, bytes(8)),
        framed([["<U4", [1], 0]], {"array": 0}, bytes(16)),
        framed([["int64", [2], 0]], {"array": 0}, bytes(8)),
        framed([["int64", [1], 0]], {"array": 0}, bytes(16)),
        framed([["int64", [-1], 0]], {"array": 0}, bytes(8)),
        framed([["int64", [1.0], 0]], {"array": 0}, bytes(8)),
        framed([["int64", [True], 0]], {"array": 0}, bytes(8)),
        framed([["int64", [1], 8]], {"array": 0}, bytes(8)),
        framed([["int64", [1], -8]], {"array": 0}, bytes(8)),
        framed([["int64", [2**62], 0]], {"array": 0}, bytes(8)),
        framed([["int64", [1], 0], ["int64", [1], 0]], [{"array": 0}, {"array": 1}], bytes(16)),
        framed([["int64", [1], 0]], {"array": 1}, bytes(8)),
        framed([["int64", [1], 0]], [{"array": 0}, {"array": 0}], bytes(8)),
        framed([["int64", [1], 0]], None, bytes(8)),
        framed([["int64", [1], 0]], {"array": [0]}, bytes(8)),
        framed([["bool", [1], 0]], {"array": 0}, b"\x02" + bytes(7)),
        framed([["int64", [1]]], {"array": 0}, bytes(8)),
        framed({}, {"array": 0}, bytes(8), more=1),
        framed(None, 1, b""),
    ],
)
def test_a_malformed_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(LockstepError, match="malformed"):
        decode(frame)


@given(st.binary(max_size=60), st.data())
def test_a_frame_that_is_cut_or_longer_is_refused(behind: bytes, data: st.DataObject) -> None:
    frame = bytes(encode({"ids": np.arange(5), "name": "p"}))
    changed = frame[: data.draw(st.integers(0, len(frame) - 1))] if not behind else frame + behind
    with pytest.raises(LockstepError, match="malformed"):
        decode(changed)
