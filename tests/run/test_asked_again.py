"""Reward functions are asked again: wrong scores stop the run; what cannot be compared is left out by name."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.rewards import RewardFunction, RewardLog, RewardScorer
from lockstep.watch import rewards
from lockstep.watch.rewards import AskedAgain

ROWS = {
    f"row/{p}": Prompt(
        f"row/{p}", (1, 2), [{"role": "user", "content": f"q{p}"}] if p else "q0", {"answer": p, "unit": "m"}
    )
    for p in range(3)
}


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def sampled() -> list[RolloutGroup]:
    return [
        RolloutGroup(
            row,
            tuple(
                Rollout(
                    Completion(RequestKey(name, s), (1, 2), (3, s), (-0.1, -0.2), (0, 0), "stop"),
                    decode([3, s]),
                )
                for s in range(3)
            ),
        )
        for name, row in ROWS.items()
    ]


def exact(
    prompts: list, completions: list, completion_ids: list, answer: list, **more: Any
) -> list[float | None]:
    """Depends on everything that a function gets; one completion has no score."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert len(more["unit"]) == len(texts) == len(prompts)
    more["log_metric"]("seen", 1.0)
    return [
        None if ids[-1] == 2 and a == 1 else 10 * a + ids[-1] + len(t) + len(str(p))
        for t, ids, a, p in zip(texts, completion_ids, answer, prompts, strict=True)
    ]


def noisy(completions: list, **more: Any) -> list[float]:
    return [random.random() for _ in completions]


def by_rank(completion_ids: list, **more: Any) -> list[float]:
    """The score of a completion is its place among all completions of the call."""
    sums = [sum(ids) for ids in completion_ids]
    return [float(np.searchsorted(sorted(sums), s)) + len(sums) for s in sums]


class Once:
    """Fails when it is called a second time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list, **more: Any) -> list[float]:
        self.calls += 1
        if self.calls > 1:
            raise FileExistsError("written already")
        return [1.0] * len(completions)


async def remote(completions: list, **more: Any) -> list[float]:
    raise AssertionError("a service is not asked twice")


def asked(functions: Sequence[RewardFunction], **more: Any) -> tuple[AskedAgain, RewardScorer]:
    scorer = RewardScorer(functions, [1.0] * len(functions), 10.0)
    return AskedAgain(scorer, decode, 10.0, **{"wanted": True, **more}), scorer


def scored(scorer: RewardScorer) -> list[RolloutGroup]:
    return scorer.finish(scorer.score(sampled(), None, RewardLog()))


def check(proof: AskedAgain, groups: list[RolloutGroup], number: int = 0) -> dict[str, float]:
    return proof.check(groups, ROWS, None, (0, number))


def test_right_scores_pass_and_the_share_is_logged() -> None:
    proof, scorer = asked([exact, by_rank])
    assert check(proof, scored(scorer)) == {"checked/asked_again": pytest.approx(1 / 3)}


def _rotated(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    found = []
    for g in groups:
        moved = [*g.rollouts[1:], g.rollouts[0]]
        found.append(
            replace(
                g, rollouts=tuple(replace(r, scores=m.scores) for r, m in zip(g.rollouts, moved, strict=True))
            )
        )
    return found


def _of_next_group(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [
        replace(
            g,
            rollouts=tuple(
                replace(r, scores=o.scores) for r, o in zip(g.rollouts, other.rollouts, strict=True)
            ),
        )
        for g, other in zip(groups, [*groups[1:], groups[0]], strict=True)
    ]


def _none_as_zero(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [
        replace(
            g,
            rollouts=tuple(
                replace(r, scores={n: 0.0 if s is None else s for n, s in r.scores.items()})
                for r in g.rollouts
            ),
        )
        for g in groups
    ]


@pytest.mark.parametrize("fault", [_rotated, _of_next_group, _none_as_zero])
def test_scores_of_other_completions_stop_the_run(
    fault: Callable[[list[RolloutGroup]], list[RolloutGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "SHARE", math.inf)
    proof, scorer = asked([exact])
    wrong = fault(scored(scorer))

    def twenty_generations() -> None:
        for number in range(20):
            check(proof, wrong, number)

    with pytest.raises(ProofError, match=r"exact gave row/\d.* a score of .* it gives"):
        twenty_generations()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (noisy, "noisy gives other scores when it is asked again"),
        (by_rank, "by_rank scores a completion by the other completions"),
        (Once(), "Once fails when it is asked again"),
    ],
)
def test_a_function_that_cannot_be_compared_is_named_once(
    function: RewardFunction, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "SHARE", math.inf)
    proof, scorer = asked([function, exact])
    groups = scored(scorer)
    for number in range(3):
        check(proof, groups, number)
    assert capsys.readouterr().out.count(why) == 1
    # The other function is still compared.
    with pytest.raises(ProofError, match="exact gave"):
        check(proof, _rotated(groups), 1)


def test_global_random_numbers_are_those_of_a_run_without_it() -> None:
    proof, scorer = asked(
        [lambda completions, **more: [float(torch.rand(())) + random.random() for _ in completions]]
    )
    groups = scored(scorer)
    before = random.getstate(), torch.get_rng_state()
    check(proof, groups)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_what_must_not_be_asked_twice_is_not_asked() -> None:
    def once(completions: list, **more: Any) -> list[float]:
        raise AssertionError("asked again")

    assert check(asked([once], wanted=False)[0], sampled()) == {}
    assert check(asked([remote])[0], sampled()) == {}
    made = [replace(g, rollouts=tuple(replace(r, notes={"turns": 2}) for r in g.rollouts)) for g in sampled()]
    assert check(asked([once])[0], made) == {"checked/asked_again": 0.0}


def test_a_slow_function_is_asked_within_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow(completions: list, **more: Any) -> list[float]:
        calls.append(len(completions))
        return [0.0] * len(completions)

    proof, scorer = asked([slow])
    groups = scored(scorer)
    check(proof, groups)
    monkeypatch.setattr(rewards, "SHARE", 0.0)
    assert check(proof, groups, 1) == {"checked/asked_again": 0.0}
    assert calls == [9, 3]


class Wavers:
    """Gives other scores when it is asked again, and then fails."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list, **more: Any) -> list[float]:
        self.calls += 1
        if self.calls > 2:
            raise ConnectionError("too many calls")
        return [float(self.calls)] * len(completions)


def test_a_function_that_differs_and_then_fails_twice_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    proof, scorer = asked([Wavers()])
    groups = scored(scorer)
    with caplog.at_level("WARNING"):
        check(proof, groups)
    assert caplog.text.count("fails when it is asked again") == 1
    assert check(proof, groups, 1) == {}
