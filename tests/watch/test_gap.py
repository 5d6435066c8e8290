"""The parity gap: its arithmetic, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.errors import ProofError
from lockstep.watch.gap import (
    GapStats,
    PooledGap,
    PooledSlope,
    check_count,
    gap_error,
    measure_gap,
    measure_slope,
    over_limits,
)
from lockstep.watch.tolerances import tolerance

SINGLE = tolerance(torch.float32, torch.float32)


def test_the_numbers_are_the_definitions() -> None:
    behaviour, policy = torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.8])
    stats = measure_gap(behaviour, policy, ["a#0", "b#0"], [1, 1])
    assert stats.mean_abs == pytest.approx(0.15)
    assert (stats.max_abs, stats.worst) == (pytest.approx(0.2), "b#0")
    assert stats.k3 == pytest.approx(sum(math.exp(-g) - 1 + g for g in (0.1, -0.2)) / 2)


def test_few_tokens_are_held_to_the_largest_gap_at_once_and_to_the_means_when_they_are_many() -> None:
    half = tolerance(torch.bfloat16, torch.bfloat16)
    # Two tokens alone with ordinary gaps of bf16 are over the limits on means.
    one = measure_gap(torch.tensor([-1.4, -1.4]), torch.tensor([-1.0, -1.0]), ["a#0"], [2])
    assert over_limits(one, half)
    pool = PooledGap()
    assert not over_limits(pool.add(one, half), half)
    assert not over_limits(pool.add(GapStats(), half), half)
    # A gap over the limit on the largest gap is always refused.
    assert over_limits(
        PooledGap().add(measure_gap(torch.tensor([-5.0]), torch.tensor([-1.0]), ["a#0"], [1]), half), half
    )
    assert over_limits(PooledGap().add(replace(one, max_abs=math.nan), half), half)
    # A small gap on every token is detected after enough steps have been collected.
    steps = [
        over_limits(
            pool.add(measure_gap(torch.full((16,), -1.3), torch.full((16,), -1.0), ["a#0"], [16]), half), half
        )
        for _ in range(16)
    ]
    assert [bool(found) for found in steps] == [False] * 15 + [True]
    # Then the collection starts again.
    assert not over_limits(pool.add(one, half), half)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=12), st.integers(1, 11))
def test_the_parts_of_a_step_add_up(gaps: list[float], cut: int) -> None:
    values = torch.tensor(gaps)
    names = [str(i) for i in range(len(gaps))]
    whole = measure_gap(values, torch.zeros_like(values), names, [1] * len(names))
    cut = min(cut, len(gaps) - 1)
    parts = measure_gap(values[:cut], torch.zeros(cut), names[:cut], [1] * cut) + measure_gap(
        values[cut:], torch.zeros(len(gaps) - cut), names[cut:], [1] * (len(gaps) - cut)
    )
    assert parts.tokens == whole.tokens
    assert parts.sum_abs == pytest.approx(whole.sum_abs)
    assert parts.max_abs == pytest.approx(whole.max_abs)
    assert parts.sum_k3 == pytest.approx(whole.sum_k3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_the_worst_token_is_named_by_its_own_request(lengths: list[int], data: st.DataObject) -> None:
    assume(sum(lengths))
    worst = data.draw(st.integers(0, sum(lengths) - 1))
    names = [f"r#{i}" for i, length in enumerate(lengths) for _ in range(length)]
    behaviour = torch.full((len(names),), -1.0)
    behaviour[worst] = -2.0
    requests = [f"r#{i}" for i in range(len(lengths))]
    assert measure_gap(behaviour, torch.full((len(names),), -1.0), requests, lengths).worst == names[worst]


def test_tokens_that_belong_to_no_request_are_refused() -> None:
    with pytest.raises(ValueError, match="2 behaviour log-probs, 2 policy log-probs, 1 requests of 3 tokens"):
        measure_gap(torch.zeros(2), torch.zeros(2), ["a#0"], [3])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_log_prob_that_is_not_finite_is_an_error(bad: float) -> None:
    with pytest.raises(ProofError, match="b#1 is not finite"):
        measure_gap(torch.tensor([-1.0, bad]), torch.zeros(2), ["a#0", "b#1"], [1, 1])


@pytest.mark.parametrize(
    "stats",
    [
        GapStats(100, sum_abs=1.0, max_abs=9e-4, sum_k3=0.0),
        GapStats(100, sum_abs=0.001, max_abs=2e-3, sum_k3=0.0),
        GapStats(100, sum_abs=0.001, max_abs=9e-4, sum_k3=1.0),
        GapStats(100, sum_abs=float("nan"), max_abs=0.0, sum_k3=0.0),
    ],
)
def test_any_limit_stops_the_step(stats: GapStats) -> None:
    assert len(over_limits(stats, SINGLE)) >= 1
    error = gap_error(stats, SINGLE, 4, "parts", "cause", "fix")
    assert error.check == "gap"
    assert all(over in str(error) for over in over_limits(stats, SINGLE))


def test_a_token_that_was_not_compared_stops_the_step() -> None:
    with pytest.raises(ProofError, match="99 tokens were compared at version 4, 100 were sampled"):
        check_count(GapStats(99), 100, 4)


def test_a_clean_step_passes() -> None:
    clean = GapStats(100, sum_abs=6e-4, max_abs=6e-5, sum_k3=2e-7)
    check_count(clean, 100, 4)
    assert over_limits(clean, SINGLE) == []


def test_only_fp32_on_both_sides_gets_the_tight_limits() -> None:
    assert tolerance(torch.bfloat16, torch.bfloat16) == tolerance(torch.float32, torch.bfloat16) != SINGLE


def tokens_of(
    temperature: float, noise: float, *, prompts: int = 32, copies: int = 8, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, list[str], list[int]]:
    """Gap and surprise of tokens of an engine at `temperature` × the policy's. Completions of a prompt are alike."""
    draw = np.random.default_rng(seed)
    surprises = draw.normal(0, 1.5, (prompts, 1, 8)).repeat(copies, axis=1)
    rounding = draw.normal(0, noise, (prompts, 1, 8)).repeat(copies, axis=1)
    gap = (1 / temperature - 1) * surprises + rounding
    names = [f"p{i}" for i in range(prompts) for _ in range(copies)]
    return gap.ravel(), surprises.ravel(), names, [8] * (prompts * copies)


@pytest.mark.parametrize("temperature", [0.95, 1.03, 1.05, 1.2])
def test_another_temperature_shows_in_the_signed_gap_where_its_mean_is_within_half_precision(
    temperature: float,
) -> None:
    half, pool = tolerance(torch.bfloat16, torch.bfloat16), PooledSlope()
    gap, surprises, names, lengths = tokens_of(temperature, 0.05, prompts=256)
    if temperature < 1.2:
        assert over_limits(measure_gap(gap, np.zeros(len(gap)), names, lengths), half) == []
    with pytest.raises(ProofError, match=rf"as at {temperature:.2f} times the temperature") as failed:
        pool.check(measure_slope(gap, surprises, names, lengths), half, 3)
    assert failed.value.check == "gap"
    assert ("flatter" if temperature > 1 else "sharper") in failed.value.cause


def test_rounding_that_all_completions_of_a_prompt_share_is_no_slope() -> None:
    half = tolerance(torch.bfloat16, torch.bfloat16)
    for seed in range(200):
        # Few tokens with large rounding: a standard error over tokens would take them for eight times as many.
        found = measure_slope(*tokens_of(1.0, 0.3, prompts=24, seed=seed))
        PooledSlope().check(found, half, seed)


def test_a_slope_waits_for_tokens_and_prompts_and_its_sums_begin_anew() -> None:
    half, pool = tolerance(torch.bfloat16, torch.bfloat16), PooledSlope()
    pool.check(measure_slope(*tokens_of(1.2, 0.01, prompts=20)), half, 0)
    with pytest.raises(ProofError, match="the signed gap grows"):
        pool.check(measure_slope(*tokens_of(1.2, 0.01, prompts=4, seed=1)), half, 1)
    late = PooledSlope()
    for version in range(20):
        late.check(measure_slope(*tokens_of(1.0, 0.01, seed=version)), half, version)
    # A fault that begins late is not diluted by all tokens before it.

    def begins_late() -> None:
        for version in range(20, 60):
            late.check(measure_slope(*tokens_of(1.05, 0.01, seed=version)), half, version)

    with pytest.raises(ProofError, match="the signed gap grows"):
        begins_late()
    assert late.now.tokens < 20_000


def test_the_sums_of_a_slope_add_up() -> None:
    gap, surprises, names, lengths = tokens_of(1.05, 0.1)
    cut = 40  # completions, whole prompts
    parts = [
        measure_slope(gap[: cut * 8], surprises[: cut * 8], names[:cut], lengths[:cut]),
        measure_slope(gap[cut * 8 :], surprises[cut * 8 :], names[cut:], lengths[cut:]),
    ]
    whole, added = measure_slope(gap, surprises, names, lengths), parts[0] + parts[1]
    assert (added.tokens, added.prompts) == (whole.tokens, whole.prompts)
    assert added.slope == pytest.approx(whole.slope)
    assert added.error == pytest.approx(whole.error)
