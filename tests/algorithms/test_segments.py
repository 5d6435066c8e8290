"""Functions on flat tokens and their completions equal loops over the completions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.segments import Segments

rows_of_values = st.lists(st.lists(st.floats(-3, 3, width=32), max_size=6), min_size=1, max_size=6)


@settings(deadline=None)
@given(rows_of_values)
def test_sums_means_and_spread_are_those_of_each_completion(rows: list[list[float]]) -> None:
    segments = Segments(torch.tensor([len(row) for row in rows]))
    values = torch.tensor([value for row in rows for value in row])
    assert segments.ids.tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert segments.sums(values).tolist() == pytest.approx([sum(row) for row in rows], abs=1e-5)
    assert segments.means(values).tolist() == pytest.approx([sum(r) / max(len(r), 1) for r in rows], abs=1e-5)
    spread = segments.spread(torch.arange(float(len(rows))))
    assert spread.tolist() == [float(i) for i, row in enumerate(rows) for _ in row]


def test_gradients_flow_back_to_each_token() -> None:
    segments = Segments(torch.tensor([2, 0, 1]))
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    means = segments.means(values)
    assert means.dtype == torch.float64
    (segments.spread(means) * torch.tensor([1.0, 3.0, 5.0])).sum().backward()
    assert values.grad.tolist() == [2.0, 2.0, 5.0]


def test_values_that_are_not_one_a_token_are_an_error() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        Segments(torch.tensor([2, 1])).sums(torch.zeros(4))
