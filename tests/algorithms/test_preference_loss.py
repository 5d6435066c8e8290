"""Pairs: which completion is preferred, and the losses on them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.losses import choose, preference_loss

logps = st.floats(-20, 0)


@settings(deadline=None)
@given(logps, logps, logps, logps, st.floats(0.05, 1))
def test_the_losses_are_the_papers(chosen: float, rejected: float, rc: float, rr: float, beta: float) -> None:
    numbers = [torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected, rc, rr)]
    margin = math.log(math.exp(chosen - rc) / math.exp(rejected - rr))
    dpo = -math.log(1 / (1 + math.exp(-beta * margin)))
    assert preference_loss(*numbers, beta, "sigmoid").item() == pytest.approx(dpo, abs=1e-9)
    assert preference_loss(*numbers, beta, "ipo").item() == pytest.approx(
        (margin - 0.5 / beta) ** 2, abs=1e-6
    )


def test_the_gradient_raises_the_chosen_and_lowers_the_rejected() -> None:
    chosen, rejected = torch.tensor([-2.0], requires_grad=True), torch.tensor([-3.0], requires_grad=True)
    preference_loss(
        chosen, rejected, torch.tensor([-2.0]), torch.tensor([-3.0]), 0.1, "sigmoid"
    ).sum().backward()
    assert chosen.grad.item() == pytest.approx(-0.05)
    assert rejected.grad.item() == pytest.approx(0.05)


def test_a_large_margin_neither_overflows_nor_vanishes() -> None:
    far = torch.tensor([-2000.0])
    assert (
        preference_loss(far, torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0, "sigmoid").item() == 2000.0
    )


def test_a_tie_and_a_missing_score_choose_nobody() -> None:
    first = torch.tensor([1.0, 0.0, 0.5, math.nan, 1.0, math.nan])
    second = torch.tensor([0.0, 1.0, 0.5, 1.0, math.nan, math.nan])
    assert choose(first, second).tolist() == [0, 1, -1, -1, -1, -1]
