"""Token weights and the clipped loss, against their formulas written the long way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.corrections import truncated_token_weights
from lockstep.algorithms.policy_loss import clipped_policy_loss, token_weights

lengths_of_step = st.lists(st.integers(1, 20), min_size=1, max_size=10)


@given(lengths_of_step, st.data())
def test_weighted_sums_are_the_papers_averages(lengths: list[int], data: st.DataObject) -> None:
    losses = [data.draw(st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n)) for n in lengths]
    limit = 20

    def weighted(kind: str) -> float:
        weights = token_weights(torch.tensor(lengths), kind, limit)  # type: ignore[arg-type]
        return sum(float(w) * sum(tokens) for w, tokens in zip(weights, losses, strict=True))

    assert weighted("grpo") == pytest.approx(sum(sum(t) / len(t) for t in losses) / len(losses), abs=1e-5)
    assert weighted("dr_grpo") == pytest.approx(sum(map(sum, losses)) / (len(losses) * limit), abs=1e-5)
    assert weighted("dapo") == pytest.approx(sum(map(sum, losses)) / sum(lengths), abs=1e-5)
    assert weighted("bnpo") == weighted("dapo")


def test_a_masked_completion_still_counts_as_one_of_the_batch_for_grpo_only() -> None:
    assert token_weights(torch.tensor([0, 4]), "grpo", 8)[1] == pytest.approx(1 / 8)
    assert token_weights(torch.tensor([0, 4]), "dapo", 8)[1] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "flows"),
    [
        (1.0, 1.0, -1.0, True),
        (1.5, 1.0, -1.28, False),
        (1.5, -1.0, 1.5, True),
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),
    ],
)
def test_the_clip_holds_only_where_it_would_help(ratio: float, advantage: float, loss: float, flows: bool) -> None:
    logps = torch.tensor([ratio]).log().requires_grad_()
    token = clipped_policy_loss(logps, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    token.loss.sum().backward()
    assert token.loss.item() == pytest.approx(loss)
    assert (logps.grad.item() != 0.0) == flows
    assert bool(token.low_clipped | token.high_clipped) == (not flows)


def test_without_movement_the_gradient_is_the_policy_gradient() -> None:
    logps = torch.tensor([-0.3, -2.0], requires_grad=True)
    clipped_policy_loss(logps, logps.detach(), torch.tensor([2.0, -1.0]), 0.2, 0.2).loss.sum().backward()
    assert logps.grad.tolist() == [-2.0, 1.0]


def test_importance_weights_are_one_at_parity_and_truncated_above() -> None:
    weights = truncated_token_weights(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -1.0]), 3.0)
    assert weights.tolist() == pytest.approx([1.0, 3.0, torch.tensor(-2.0).exp().item()])
