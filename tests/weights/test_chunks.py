"""Tensors that are cut into chunks, laid out in memory and viewed again are unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.weights.wire.stream import buffer_bytes, chunks, layout, views

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12), st.integers(1, 3000))
def test_tensors_come_back_in_order_and_bit_for_bit(kinds: list, limit: int) -> None:
    named = [(f"t{i}", (torch.rand(shape) * 100).to(dtype)) for i, (shape, dtype) in enumerate(kinds)]
    found = []
    for chunk in chunks(named, limit):
        placed, size = layout(chunk)
        assert buffer_bytes(placed) <= size
        assert len(chunk) == 1 or size <= limit
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, target), (_, source) in zip(views(buffer, placed), chunk, strict=True):
            target.copy_(source)
        found += [(name, tensor.clone()) for name, tensor in views(buffer, [list(p) for p in placed])]
    assert [name for name, _ in found] == [name for name, _ in named]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(found, named, strict=True))


def test_a_tensor_outside_its_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the buffer"):
        views(torch.zeros(8, dtype=torch.uint8), [["t", "float32", [3], 0]])
    with pytest.raises(ValueError, match="outside the buffer"):
        views(torch.zeros(128, dtype=torch.uint8), [["t", "uint8", [65], 64]])


@pytest.mark.parametrize(
    "entry",
    [
        # A shape of [-1] would be a view of all bytes but the last four.
        ["t", "float32", [-1], 0],
        ["t", "float32", [0, -3], 0],
        ["t", "float32", [1.5], 0],
        ["t", "uint8", [True], 0],
        ["t", "uint8", ["4"], 0],
        ["t", "uint8", 4, 0],
        ["t", "uint8", [4], -64],
        ["t", "uint8", [4], 3],
        ["t", "uint8", [4], 0.0],
        ["t", "uint8", [4], "0"],
        ["t", "load", [1], 0],
        ["t", "nn", [1], 0],
        ["t", "float33", [1], 0],
        ["t", 3, [1], 0],
        [3, "uint8", [4], 0],
        [None, "uint8", [4], 0],
        ["t", "uint8", [4]],
        ["t", "uint8", [4], 0, 1],
    ],
)
def test_a_place_that_no_trainer_wrote_is_refused_in_one_sentence(entry: list) -> None:
    for read in (lambda: views(torch.zeros(64, dtype=torch.uint8), [entry]), lambda: buffer_bytes([entry])):
        with pytest.raises(ValueError, match="is no place of a tensor"):
            read()
