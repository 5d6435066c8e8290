"""Group advantages: hand-computed values and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import (
    compared,
    group_advantages,
    leave_one_out_advantages,
    normalised_reward_advantages,
    whiten,
)

groups_of_rewards = st.lists(
    st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), min_size=1, max_size=4
)


def test_hand_computed_values() -> None:
    (grouped,) = group_advantages([torch.tensor([1.0, 0.0, 0.0, 1.0])], "group")
    deviation = 0.5773503 + 1e-4
    assert grouped.tolist() == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation]
    )
    (unscaled,) = group_advantages([torch.tensor([1.0, 0.0, 0.0, 1.0])], "none")
    assert unscaled.tolist() == [0.5, -0.5, -0.5, 0.5]
    first, second = group_advantages([torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0])], "batch")
    assert first.tolist() == pytest.approx([0.5 / (0.9574271 + 1e-4), -0.5 / (0.9574271 + 1e-4)])
    assert second.tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(groups_of_rewards, st.sampled_from(["group", "batch", "none"]))
def test_a_groups_advantages_sum_to_zero_and_equal_rewards_give_exact_zeros(
    rewards: list[list[float]], scale: str
) -> None:
    tensors = [torch.tensor(group) for group in rewards]
    for group, advantages in zip(tensors, group_advantages(tensors, scale), strict=True):  # type: ignore[arg-type]
        assert advantages.shape == group.shape
        if len(set(group.tolist())) == 1:
            assert advantages.tolist() == [0.0] * len(group)
        # The rounding of the mean is divided by the standard deviation, which may be as small as the constant added
        # to it.
        assert abs(float(advantages.sum())) < 0.1


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), groups_of_rewards)
def test_group_scaling_never_looks_at_other_groups(one: list[float], others: list[list[float]]) -> None:
    alone = group_advantages([torch.tensor(one)], "group")[0]
    among = group_advantages([*(torch.tensor(group) for group in others), torch.tensor(one)], "group")[-1]
    assert torch.equal(alone, among)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=5), st.integers(0, 5))
def test_a_completion_without_a_score_changes_nothing_for_the_others(
    rewards: list[float], place: int
) -> None:
    place = min(place, len(rewards))
    gapped = torch.tensor([*rewards[:place], math.nan, *rewards[place:]])
    functions = (
        lambda group: group_advantages([group], "group"),
        lambda group: group_advantages([group], "batch"),
        lambda group: group_advantages([group], "none"),
        lambda group: leave_one_out_advantages([group]),
        lambda group: normalised_reward_advantages([group[:, None]], torch.ones(1)),
        lambda group: [whiten(group)],
    )
    for function in functions:
        (whole,), (part,) = function(torch.tensor(rewards)), function(gapped)
        assert part[place] == 0.0
        assert part[torch.arange(len(part)) != place].tolist() == pytest.approx(whole.tolist(), abs=1e-5)


def test_a_group_that_nobody_scored_or_that_has_one_score_teaches_nothing() -> None:
    nothing, single = torch.full((3,), math.nan), torch.tensor([math.nan, 4.0])
    for scale in ("group", "batch", "none"):
        assert [a.tolist() for a in group_advantages([nothing, single], scale)] == [[0.0] * 3, [0.0] * 2]  # type: ignore[arg-type]
    assert [a.tolist() for a in leave_one_out_advantages([nothing, single])] == [[0.0] * 3, [0.0] * 2]
    scores = [group[:, None].expand(-1, 2) for group in (nothing, single)]
    assert [a.tolist() for a in normalised_reward_advantages(scores, torch.ones(2))] == [[0.0] * 3, [0.0] * 2]
    masks = compared([nothing, single, torch.tensor([1.0, math.nan, 2.0])])
    assert [mask.tolist() for mask in masks] == [[False] * 3, [False] * 2, [True, False, True]]


@settings(deadline=None)
@given(groups_of_rewards)
def test_each_reward_is_compared_with_the_mean_of_the_others(rewards: list[list[float]]) -> None:
    found = leave_one_out_advantages([torch.tensor(group) for group in rewards])
    for group, advantages in zip(rewards, found, strict=True):
        others = [(sum(group) - r) / (len(group) - 1) for r in group]
        assert advantages.tolist() == pytest.approx(
            [r - o for r, o in zip(group, others, strict=True)], abs=1e-4
        )
        if len(set(group)) == 1:
            assert advantages.tolist() == [0.0] * len(group)


def test_a_large_reward_function_does_not_drown_a_small_one() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.0, 1000.0], [1.0, 1000.0], [0.0, 0.0]])
    (advantages,) = normalised_reward_advantages([scores], torch.ones(2))
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 1.5**0.5, -(1.5**0.5)], abs=1e-3)
    (leaning,) = normalised_reward_advantages([scores], torch.tensor([2.0, 1.0]))
    assert leaning.sign().tolist() == [1.0, -1.0, 1.0, -1.0]


def test_a_function_that_scored_some_completions_only_is_scaled_over_those() -> None:
    scores = torch.tensor([[1.0, math.nan], [0.0, 2.0], [math.nan, math.nan], [1.0, 6.0]])
    (advantages,) = normalised_reward_advantages([scores], torch.tensor([1.0, 0.5]))
    first = [(x - 2 / 3) / (0.5773503 + 1e-4) for x in (1.0, 0.0, 1.0)]
    second = [0.0, *(0.5 * (x - 4) / (2.828427 + 1e-4) for x in (2.0, 6.0))]
    totals = torch.tensor([a + b for a, b in zip(first, second, strict=True)])
    expected = (totals - totals.mean()) / (totals.std() + 1e-4)
    assert advantages[[0, 1, 3]].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert advantages[2] == 0.0


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), st.data())
def test_whitened_values_have_mean_zero_and_deviation_one(values: list[float], data: st.DataObject) -> None:
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    scaled = whiten(torch.tensor(values), mask)
    assert scaled[~mask].tolist() == [0.0] * int((~mask).sum())
    counted = torch.tensor(values)[mask]
    if len(counted) > 1 and counted.std() > 0.1:
        assert float(scaled[mask].mean()) == pytest.approx(0.0, abs=1e-3)
        assert float(scaled[mask].std()) == pytest.approx(1.0, abs=2e-3)


def test_no_groups_have_no_advantages() -> None:
    assert group_advantages([], "batch") == []
    assert leave_one_out_advantages([]) == []
    assert normalised_reward_advantages([], torch.ones(2)) == []
