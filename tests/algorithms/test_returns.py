"""Returns and value losses equal sums that are written out with loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import clipped_value_loss, generalised_advantages, rewards_to_go
from lockstep.algorithms.segments import Segments

lengths_of_batch = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@settings(deadline=None)
@given(lengths_of_batch, st.floats(0, 1), st.floats(0, 0.5), st.integers(0, 1000))
def test_a_tokens_return_is_what_its_completion_still_earns(
    lengths: list[int], gamma: float, beta: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rewards, kl = torch.randn(len(lengths)), torch.randn(sum(lengths))
    found = rewards_to_go(rewards, kl, beta, Segments(torch.tensor(lengths)), gamma)
    expected = []
    for reward, prices in zip(rewards.tolist(), kl.split(lengths), strict=True):
        earned = [-beta * price for price in prices.tolist()]
        if earned:
            earned[-1] += reward
        expected += [sum(e * gamma**k for k, e in enumerate(earned[t:])) for t in range(len(earned))]
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_without_discount_and_price_every_token_has_its_completions_score() -> None:
    found = rewards_to_go(
        torch.tensor([2.0, 5.0, -1.0]), torch.randn(4), 0.0, Segments(torch.tensor([3, 0, 1]))
    )
    assert found.tolist() == [2.0, 2.0, 2.0, -1.0]


@settings(deadline=None)
@given(lengths_of_batch, st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_generalised_advantages_are_the_recursion_of_each_completion_alone(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rewards, values = torch.randn(sum(lengths)), torch.randn(sum(lengths))
    advantages, returns = generalised_advantages(rewards, values, Segments(torch.tensor(lengths)), gamma, lam)
    expected = []
    for earned, worth in zip(rewards.split(lengths), values.split(lengths), strict=True):
        row: list[float] = []
        for t in reversed(range(len(earned))):
            after = float(worth[t + 1]) if t + 1 < len(worth) else 0.0
            surprise = float(earned[t]) + gamma * after - float(worth[t])
            row.insert(0, surprise + gamma * lam * (row[0] if row else 0.0))
        expected += row
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(returns, advantages + values)


def test_with_lambda_one_the_target_is_the_discounted_return() -> None:
    segments = Segments(torch.tensor([3, 2]))
    scores = torch.tensor([1.0, -2.0])
    earned = torch.tensor([0.0, 0.0, 1.0, 0.0, -2.0])
    _, returns = generalised_advantages(earned, torch.randn(5), segments, 0.9, 1.0)
    assert torch.allclose(returns, rewards_to_go(scores, torch.zeros(5), 0.0, segments, 0.9), atol=1e-6)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "flows"),
    [
        (1.0, 1.0, 3.0, 2.0, True),
        # The value has moved too far towards the target: the clipped error is the larger one and has no gradient.
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, False),
        # The value has moved too far away from the target: the error itself is larger and has a gradient.
        (0.0, 1.0, 3.0, 4.5, True),
    ],
)
def test_moving_further_than_the_range_earns_nothing(
    value: float, old: float, target: float, loss: float, flows: bool
) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), 0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert (values.grad.item() != 0.0) == flows
