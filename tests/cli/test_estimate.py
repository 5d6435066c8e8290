"""The estimate of the demo: the measured machine gets its own figure back, and a slower machine or a longer run a larger one."""

from __future__ import annotations

import pytest
import torch

from lockstep.cli.process.estimate import MEASURED_RATE, estimated_seconds, product_rate, said


def test_the_machine_that_was_measured_gets_the_time_of_the_readme() -> None:
    # README.md: 165 s for 40 steps and 200 problems.
    assert estimated_seconds(40, 200, MEASURED_RATE) == pytest.approx(165, rel=0.02)


def test_slower_products_more_steps_and_more_problems_take_longer() -> None:
    seconds = estimated_seconds(40, 200, MEASURED_RATE)
    for longer in (
        estimated_seconds(40, 200, MEASURED_RATE / 2),
        estimated_seconds(41, 200, MEASURED_RATE),
        estimated_seconds(40, 201, MEASURED_RATE),
    ):
        assert longer > seconds
    # Starting does not only consist of matrix products.
    assert estimated_seconds(0, 0, 1e9) > 10


@pytest.mark.parametrize(
    ("seconds", "words"), [(4, "10 seconds"), (64, "60 seconds"), (165, "3 minutes"), (620, "10 minutes")]
)
def test_the_figure_is_said_as_roughly_as_it_is_known(seconds: float, words: str) -> None:
    assert f"about {words} here" in said(seconds)


def test_the_rate_of_products_is_measured_on_this_machine() -> None:
    # A machine of 1 MFLOP/s or of 10 PFLOP/s would be a mistake in the arithmetic.
    assert 1e-3 < product_rate(torch.float32) < 1e7
