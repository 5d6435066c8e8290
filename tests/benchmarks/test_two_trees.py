"""Steps of two trees in pairs: the interval of the median, and what counts as equal.

The program itself needs minutes of vLLM.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.host.two_trees import outside_the_interval, summary


# Of 20 tosses of a coin at most 5 are heads with a chance of 0.0207, and at most 6 with 0.0577; the limit is 0.025.
@pytest.mark.parametrize(("count", "outside"), [(6, 0), (8, 0), (9, 1), (20, 5), (50, 17)])
def test_the_interval_of_a_median_leaves_out_as_many_values_as_the_sign_test_says(
    count: int, outside: int
) -> None:
    assert outside_the_interval(count) == outside


def pair(this: float, other: float, loss: float = 1.0) -> dict[str, Any]:
    figures = {"grad_norm": 1.0, "reward": 0.5}
    return {
        "this": {"seconds": this, "loss": loss, **figures},
        "other": {"seconds": other, "loss": 1.0, **figures},
    }


def test_the_median_is_of_the_ratios_of_pairs_and_a_changed_loss_is_told() -> None:
    slow = [pair(1.1 * second, second) for second in range(1, 21)]
    assert summary(slow)["median"] == pytest.approx(1.1)
    assert summary(slow)["equal"] is True
    assert summary([*slow, pair(1.0, 1.0, loss=1.5)])["equal"] is False
