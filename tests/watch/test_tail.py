"""The limit on the largest gap depends on the dtypes, the number of tokens, and the tail of the run."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep import devices as cuda
from lockstep.watch.gap import GapStats, GapTail, measure_gap, over_limits
from lockstep.watch.tolerances import FALSE_ALARM, probe_limit, tolerance

HALF = tolerance(torch.bfloat16, torch.bfloat16)
SINGLE = tolerance(torch.float32, torch.float32)


def drawn(scale: float, tokens: int, seed: int) -> GapStats:
    """Gaps of both signs. Their size has an exponential distribution, as measured in bf16 (`make false-alarms`)."""
    draw = torch.Generator().manual_seed(seed)
    size = -scale * torch.rand(tokens, generator=draw, dtype=torch.double).log()
    sign = 1 - 2.0 * torch.randint(2, (tokens,), generator=draw)
    return measure_gap(size * sign, torch.zeros(tokens), ["a#0"], [tokens])


def with_one_more(stats: GapStats, gap: float) -> GapStats:
    return stats + measure_gap(torch.tensor([gap]), torch.zeros(1), ["b#0"], [1])


@pytest.mark.parametrize("by", ["PyTorch's setting", "Triton's setting"])
def test_float32_that_a_gpu_rounds_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Measured on an H200 with `tf32: true`: the largest gap was 2.3e-3."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert tolerance(torch.float32, torch.float32) == SINGLE
    if by == "Triton's setting":
        monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    else:
        monkeypatch.setattr(cuda, "cuda_rounds_float32", lambda: True)
    rounded = tolerance(torch.float32, torch.float32)
    assert SINGLE.mean < rounded.mean < HALF.mean
    assert rounded.largest(100) > 2.3e-3 > SINGLE.largest(100)
    assert tolerance(torch.bfloat16, torch.float32) == HALF
    assert probe_limit(torch.float32) > 8.6e-4


@pytest.mark.parametrize("limit", [HALF, SINGLE])
def test_the_largest_gap_may_grow_with_the_logarithm_of_the_tokens(limit: object) -> None:
    few, many = limit.largest(100), limit.largest(1_000_000)  # type: ignore[attr-defined]
    assert many / few == pytest.approx(math.log(1_000_000 / FALSE_ALARM) / math.log(100 / FALSE_ALARM))
    assert limit.largest(0) == limit.largest(1) > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("scale", [0.02, 0.04, 0.1])
def test_clean_steps_of_any_size_pass_from_the_first_on(scale: float) -> None:
    """0.1 is the widest measured tail. At this scale, a real model's mean is below an exponential distribution's."""
    tail = GapTail(HALF)
    for seed, tokens in enumerate([8, 100, 100, 500, 500, 2_000, 200_000, 500, 8]):
        stats = drawn(scale, tokens, seed)
        assert not [
            over for over in over_limits(stats, tail.limit) if not over.startswith("mean") or scale < 0.1
        ]
        tail.add(stats)


def test_one_wrong_token_is_found_that_a_limit_for_every_model_let_pass() -> None:
    tail = GapTail(HALF)
    for seed in range(60):
        tail.add(drawn(0.04, 500, seed))
    step = with_one_more(drawn(0.04, 500, 99), 1.6)
    assert not over_limits(step, HALF)
    assert [over.split()[0] for over in over_limits(step, tail.limit)] == ["max_abs_gap"]


def test_a_run_never_widens_the_limit_of_its_dtypes() -> None:
    tail = GapTail(HALF)
    tail.add(drawn(0.5, 5_000, 0))
    assert all(tail.limit.largest(tokens) == HALF.largest(tokens) for tokens in (1, 500, 10**6))


def test_a_gap_of_a_few_times_the_largest_so_far_passes() -> None:
    """Measured in bf16 on a tiny llama, whose attention is almost hard: 2.8 nats at step 57, after 1.1 at most."""
    tail = GapTail(HALF)
    for seed in range(57):
        tail.add(with_one_more(drawn(0.04, 500, seed), 1.1 if seed == 30 else 0.1))
    assert not over_limits(with_one_more(drawn(0.04, 345, 99), 2.8), tail.limit)
    assert over_limits(with_one_more(drawn(0.04, 345, 99), 3.5), tail.limit)


def test_tokens_that_the_model_is_sure_of_do_not_narrow_the_limit() -> None:
    """A policy with low entropy has gaps of nearly zero on most tokens, and the same tail on the few other tokens."""
    mixed, plain = GapTail(HALF), GapTail(HALF)
    for seed in range(20):
        step = drawn(0.04, 500, seed)
        plain.add(step)
        mixed.add(step + GapStats(tokens=50_000))
    assert mixed.limit == plain.limit


def test_gaps_of_exactly_zero_leave_the_limit_as_it_is() -> None:
    tail = GapTail(SINGLE)
    tail.add(GapStats(tokens=1_000_000))
    assert tail.limit.tail == pytest.approx(SINGLE.tail)


def test_one_token_with_the_largest_gap_that_is_allowed_fails_no_mean() -> None:
    for tokens in (1, 10, 500):
        allowed = HALF.largest(tokens)
        alone = measure_gap(torch.tensor([-allowed * 0.999]), torch.zeros(1), ["a#0"], [1])
        assert over_limits(alone + GapStats(tokens=tokens - 1), HALF) == []
        above = measure_gap(torch.tensor([-allowed * 1.001]), torch.zeros(1), ["a#0"], [1])
        assert over_limits(above + GapStats(tokens=tokens - 1), HALF)
    assert over_limits(measure_gap(torch.tensor([-1e5]), torch.zeros(1), ["a#0"], [1]), HALF)
