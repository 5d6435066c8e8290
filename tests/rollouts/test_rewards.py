"""Reward calls: TRL's convention, and one clear error for every wrong answer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.rewards import score_groups


def groups(conversational: bool = False) -> list[RolloutGroup]:
    made = []
    for p in range(2):
        source: Any = [{"role": "user", "content": f"question {p}"}] if conversational else f"question {p}"
        prompt = Prompt(f"row/{p}", (1, 2), source, {"answer": f"answer {p}"})
        rollouts = tuple(
            Rollout(Completion(RequestKey(f"row/{p}", s), (1, 2), (3, s), (-0.1, -0.2), (0, 0), "stop"), f"text {p}{s}")
            for s in range(3)
        )
        made.append(RolloutGroup(prompt, rollouts))
    return made


def rewards_of(function: Any, **kwargs: Any) -> list[list[float]]:
    functions = function if isinstance(function, list) else [function]
    weights = kwargs.pop("weights", [1.0] * len(functions))
    return [group.rewards for group in score_groups(groups(), functions, weights, **kwargs)]


def test_functions_get_prompts_completions_ids_columns_and_state_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def record(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 6

    score_groups(groups(), [record], [1.0], trainer_state="state")
    assert seen["prompts"] == ["question 0"] * 3 + ["question 1"] * 3
    assert seen["completions"] == ["text 00", "text 01", "text 02", "text 10", "text 11", "text 12"]
    assert seen["completion_ids"] == [[3, 0], [3, 1], [3, 2]] * 2
    assert seen["answer"] == ["answer 0"] * 3 + ["answer 1"] * 3
    assert seen["trainer_state"] == "state"
    score_groups(groups(conversational=True), [record], [1.0])
    assert seen["completions"][4] == [{"role": "assistant", "content": "text 11"}]
    assert seen["prompts"][0] == [{"role": "user", "content": "question 0"}]


def test_each_score_goes_to_its_own_rollout() -> None:
    assert rewards_of(lambda completions, **_: [float(text[-2:]) for text in completions]) == [[0, 1, 2], [10, 11, 12]]


def test_several_functions_are_weighed_and_none_is_left_out_of_the_sum() -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None if text.endswith("1") else 2.0 for text in completions]

    def always(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    assert rewards_of([some, always], weights=[0.5, 3.0]) == [[4.0, 3.0, 4.0]] * 2
    scored = score_groups(groups(), [some, always], [0.5, 3.0])
    assert scored[0].rollouts[1].scores == {"some": None, "always": 1.0}


def test_coroutine_functions_run_together() -> None:
    started = []

    async def slow(completions: list[str], **_: Any) -> list[float]:
        started.append(1)
        while len(started) < 2:
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    async def other(completions: list[str], **_: Any) -> list[float]:
        started.append(1)
        return [2.0] * len(completions)

    assert rewards_of([slow, other], timeout=10.0) == [[3.0] * 3] * 2


def test_a_coroutine_that_takes_too_long_is_named() -> None:
    async def stuck(**_: Any) -> list[float]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(InputError, match="stuck took longer"):
        rewards_of(stuck, timeout=0.05)


@pytest.mark.parametrize("values", [np.ones(6), torch.ones(6), tuple([1] * 6)])
def test_arrays_and_tuples_of_numbers_are_taken(values: Any) -> None:
    assert rewards_of(lambda **_: values) == [[1.0] * 3] * 2


def raises(**_: Any) -> list[float]:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "raises raised KeyError: 'oops'"),
        (lambda **_: [1.0] * 5, "returned 5 scores for 6 completions"),
        (lambda **_: [float("nan")] * 6, "NaN for all 6"),
        (lambda **_: [float("inf")] * 6, "infinite"),
        (lambda **_: ["good"] * 6, "'good', not a number"),
        (lambda **_: 1.0, "returned float, not a list"),
        (lambda **_: None, "returned NoneType, not a list"),
        (lambda **_: [None] * 6, "no reward function scored rollout row/0#0"),
        (lambda **_: [1.0, None, 1.0, 1.0, 1.0, 1.0], "no reward function scored rollout row/0#1"),
        (lambda **_: np.float64(1.0), "returned 1 scores for 6"),
    ],
)
def test_a_wrong_answer_is_one_clear_error(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        rewards_of(function)


def test_a_rollout_of_another_prompt_cannot_enter_a_group() -> None:
    first, second = groups()
    with pytest.raises(ValueError, match="does not belong to prompt row/0"):
        RolloutGroup(first.prompt, second.rollouts)
