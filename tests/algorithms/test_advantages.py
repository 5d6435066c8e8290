"""Group advantages: hand-computed values and invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.advantages import group_advantages

groups_of_rewards = st.lists(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), min_size=1, max_size=4)


def test_hand_computed_values() -> None:
    (grouped,) = group_advantages([torch.tensor([1.0, 0.0, 0.0, 1.0])], "group")
    deviation = 0.5773503 + 1e-4
    assert grouped.tolist() == pytest.approx([0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation])
    (unscaled,) = group_advantages([torch.tensor([1.0, 0.0, 0.0, 1.0])], "none")
    assert unscaled.tolist() == [0.5, -0.5, -0.5, 0.5]
    first, second = group_advantages([torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0])], "batch")
    assert first.tolist() == pytest.approx([0.5 / (0.9574271 + 1e-4), -0.5 / (0.9574271 + 1e-4)])
    assert second.tolist() == [0.0, 0.0]


@given(groups_of_rewards, st.sampled_from(["group", "batch", "none"]))
def test_a_groups_advantages_sum_to_zero_and_equal_rewards_give_exact_zeros(
    rewards: list[list[float]], scale: str
) -> None:
    tensors = [torch.tensor(group) for group in rewards]
    for group, advantages in zip(tensors, group_advantages(tensors, scale), strict=True):  # type: ignore[arg-type]
        assert advantages.shape == group.shape
        if len(set(group.tolist())) == 1:
            assert advantages.tolist() == [0.0] * len(group)
        # Rounding of the mean is divided by the deviation, which may be as small as its guard.
        assert abs(float(advantages.sum())) < 0.1


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), groups_of_rewards)
def test_group_scaling_never_looks_at_other_groups(one: list[float], others: list[list[float]]) -> None:
    alone = group_advantages([torch.tensor(one)], "group")[0]
    among = group_advantages([*(torch.tensor(group) for group in others), torch.tensor(one)], "group")[-1]
    assert torch.equal(alone, among)
