"""The figures of `make tools`: floors, shares and ratios from rounds, and the work that they count on.

No engine runs here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.against_trl.tool_model import RESULT, TURN
from benchmarks.sampling.tools import (
    CALLS,
    SAMPLED,
    ToolEnvironment,
    check_work,
    round_line,
    step_figures,
    turns_figures,
    waits_figures,
    with_barriers,
)


def waiting(wall: float, chain: float, computing: float) -> dict[str, Any]:
    return {
        "wall_s": wall,
        "chain_s": chain,
        "computing_s": computing,
        "waits": [[1.0, 0.5, 0.0], [0.0, 2.0, 0.25]],
    }


def test_the_floor_of_a_round_is_its_chain_or_its_computing_whichever_takes_longer() -> None:
    by_chain = waits_figures([waiting(6.0, 5.0, 2.0)])
    assert (by_chain["floors"], by_chain["reached"]) == (1.2, True)
    by_computing = waits_figures([waiting(6.0, 2.0, 4.0)])
    assert (by_computing["floors"], by_computing["reached"]) == (1.5, False)
    assert (by_chain["chains"], by_computing["chains"]) == (1.2, 3.0)
    assert by_chain["longest_calls_s"] == 2.25


def test_the_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    rounds = [waiting(6.0, 5.0, 1.0), waiting(60.0, 20.0, 1.0), waiting(2.0, 2.0, 1.0)]
    assert waits_figures(rounds)["floors"] == 1.2


def test_with_barriers_every_round_of_calls_lasts_as_long_as_its_longest_call() -> None:
    assert with_barriers(4.0, [[1.0, 0.5, 0.0], [0.0, 2.0, 0.25]]) == 4.0 + 1.0 + 2.0 + 0.25


def test_the_share_compares_the_same_number_of_tokens() -> None:
    rounds = [
        {
            "turns_s": turns,
            "single_s": 9.0,
            "turns_cpu_s": 8.0,
            "single_cpu_s": 6.0,
            "sampled": 900,
            "inserted": 60,
        }
        for turns in (10.0, 9.0, 30.0)
    ]
    found = turns_figures(rounds)
    assert (found["turns_tokens_per_s"], found["single_tokens_per_s"], found["share"]) == (90, 100, 0.9)
    assert found["reached"]
    assert found["cpu_share"] == 0.75
    assert not turns_figures(rounds[2:])["reached"]


def test_a_step_is_compared_only_if_both_trainers_sampled_as_much() -> None:
    def step(ours: float, theirs: float, tokens: int = 64) -> dict[str, dict[str, float]]:
        return {
            "lockstep": {"step": ours, "sampled_tokens": 64},
            "trl": {"step": theirs, "sampled_tokens": tokens},
        }

    found = step_figures([step(2.0, 6.0), step(1.0, 9.0), step(2.0, 2.0)])
    assert (found["trl_over_lockstep"], found["lockstep_s"], found["trl_s"]) == (3, 2, 6)
    with pytest.raises(SystemExit, match="different numbers of tokens"):
        step_figures([step(2.0, 6.0, tokens=60)])
    # Each round is printed as it comes.
    assert (
        round_line(0, step(4.0, 6.0))
        == "round 0 (warm-up, not counted): lockstep 4.00 s, trl 6.00 s, ratio 1.50"
    )
    assert round_line(2, step(1.0, 9.0)) == "round 2: lockstep 1.00 s, trl 9.00 s, ratio 9.00"


def test_a_rollout_with_other_turns_or_tokens_stops_the_benchmark() -> None:
    def rollout(turns: int, sampled: int) -> Any:
        return SimpleNamespace(
            turns=[None] * turns, branches=[SimpleNamespace(sampled_places=np.arange(sampled))]
        )

    check_work([rollout(CALLS + 1, SAMPLED)] * 2, [CALLS + 1] * 2)
    for other in (rollout(CALLS, SAMPLED), rollout(CALLS + 1, SAMPLED - TURN)):
        with pytest.raises(SystemExit, match="1 rollouts differ"):
            check_work([rollout(CALLS + 1, SAMPLED), other], [CALLS + 1] * 2)


def test_the_calls_of_a_rollout_take_what_its_seed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.sampling.tools.time.sleep", slept.append)
    monkeypatch.setattr(ToolEnvironment, "longest", 2.0)

    def waits(seed: int) -> list[float]:
        desk = ToolEnvironment()
        desk.reset(seed)
        assert {desk.look(n) for n in range(CALLS)} == {RESULT}
        return desk.waits

    first, again, other = waits(1), waits(1), waits(2)
    assert first == again != other
    assert slept == [*first, *again, *other]
    assert all(0 <= wait <= 2 for wait in slept)
