"""Importance weights: hand-computed values, bounds, and the ratio that each mode uses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.corrections import effective_sample_size, importance_weights
from lockstep.algorithms.segments import Segments

TWO = Segments(torch.tensor([2, 1]))
# Ratios 2, 4 | 0.25; products 8 | 0.25; geometric means sqrt(8) | 0.25.
LOG_RATIOS = torch.tensor([2.0, 4.0, 0.25]).log()

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask"]


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "weights"),
    [
        ("token_truncate", None, 3.0, [2.0, 3.0, 0.25]),
        ("token_truncate", 0.5, None, [2.0, 4.0, 0.5]),
        ("token_truncate", None, None, [2.0, 4.0, 0.25]),
        ("token_mask", 0.5, 3.0, [2.0, 0.0, 0.0]),
        ("token_mask", None, 3.0, [2.0, 0.0, 0.25]),
        ("sequence_truncate", 0.5, 5.0, [5.0, 5.0, 0.5]),
        ("sequence_mask", None, 5.0, [0.0, 0.0, 0.25]),
        ("sequence_mask", 0.5, None, [8.0, 8.0, 0.0]),
        ("sequence_geometric_mask", 0.5, 3.0, [1.0, 1.0, 0.0]),
        ("sequence_geometric_mask", None, 2.5, [0.0, 0.0, 1.0]),
    ],
)
def test_hand_computed_weights(
    mode: str, clip_min: float | None, clip_max: float | None, weights: list[float]
) -> None:
    found = importance_weights(LOG_RATIOS - 1.0, torch.full((3,), -1.0), TWO, mode, clip_min, clip_max)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(weights)


@pytest.mark.parametrize("mode", MODES)
def test_at_parity_every_weight_is_exactly_one_and_carries_no_gradient(mode: str) -> None:
    logps = torch.randn(3, requires_grad=True)
    weights = importance_weights(logps, logps.detach(), TWO, mode, 0.5, 3.0)  # type: ignore[arg-type]
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not weights.requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_log_prob_is_not_hidden(mode: str) -> None:
    weights = importance_weights(torch.tensor([-1.0, math.nan, -1.0]), torch.zeros(3), TWO, mode, 0.5, 3.0)  # type: ignore[arg-type]
    assert weights.isnan().any()


@settings(deadline=None)
# Weights whose squares do not underflow.
@given(st.lists(st.just(0.0) | st.floats(1e-100, 10), min_size=1, max_size=20))
def test_the_effective_share_lies_between_one_sample_and_all(weights: list[float]) -> None:
    square_sum = sum(w * w for w in weights)
    share = effective_sample_size(sum(weights), square_sum, len(weights))
    assert square_sum == 0 or 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_the_effective_share_of_equal_of_one_and_of_no_weights() -> None:
    assert effective_sample_size(3 * 0.7, 3 * 0.49, 3) == pytest.approx(1.0)
    assert effective_sample_size(5.0, 25.0, 4) == 0.25
    assert effective_sample_size(0.0, 0.0, 4) == 0.0
    assert effective_sample_size(0.0, 0.0, 0) == 0.0
