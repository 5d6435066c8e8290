"""Judges of pairs: their arguments, and one clear error for every wrong verdict."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.judges import judge_pairs


def group(row: int, source: Any, texts: list[str]) -> RolloutGroup:
    rollouts = [
        Rollout(Completion(RequestKey(f"row/{row}", s), (1,), (3,), (-0.1,), (0,), "stop"), text)
        for s, text in enumerate(texts)
    ]
    return RolloutGroup(Prompt(f"row/{row}", (1,), source), tuple(rollouts))


PAIRS = [
    group(0, "plain", ["a", "bb"]),
    group(1, [{"role": "user", "content": "hi"}], ["ccc", "d"]),
    group(2, "x", ["e", "e"]),
]


class Judge:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> Any:
        return self.answer(prompts, completions, shuffle_order) if callable(self.answer) else self.answer


def test_each_verdict_is_about_its_own_pair_of_texts() -> None:
    seen: list[Any] = []

    def longer(prompts: list[str], completions: list[list[str]], shuffle_order: bool) -> list[int]:
        seen.extend([prompts, completions, shuffle_order])
        return [-1 if len(a) == len(b) else int(len(b) > len(a)) for a, b in completions]

    assert judge_pairs(PAIRS, Judge(longer), 60.0) == [1, 0, -1]
    assert seen == [["plain", "User: hi", "x"], [["a", "bb"], ["ccc", "d"], ["e", "e"]], True]
    judge_pairs(PAIRS, Judge(longer), 60.0, shuffle_order=False)
    assert seen[-1] is False


@pytest.mark.parametrize(
    "answer", [(1, 0, -1), np.array([1, 0, -1]), torch.tensor([1, 0, -1]), [np.int64(1), 0, -1]]
)
def test_any_list_of_integers_is_taken(answer: Any) -> None:
    found = judge_pairs(PAIRS, Judge(answer), 60.0)
    assert found == [1, 0, -1]
    assert {type(verdict) for verdict in found} == {int}


def fails(*_: Any) -> list[int]:
    raise ConnectionError("no route")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fails, "judge Judge raised ConnectionError: no route"),
        ([0, 1], "returned 2 verdicts for 3 pairs"),
        ([0, 1, 2], "returned 2, not 0 or 1"),
        ([0, 1, -2], "returned -2, not 0 or 1"),
        ([0, 1, 1.0], "returned 1.0, not 0 or 1"),
        ([0, 1, None], "returned None, not 0 or 1"),
        ([0, 1, "1"], "returned '1', not 0 or 1"),
        ([0, 1, True], "returned True, not 0 or 1"),
        ([0, 1, np.bool_(True)], "not 0 or 1"),
        (None, "returned NoneType, not a list"),
        (torch.tensor(1), "returned Tensor, not a list"),
    ],
)
def test_a_wrong_verdict_is_one_clear_error(answer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        judge_pairs(PAIRS, Judge(answer), 60.0)


@pytest.mark.parametrize("texts", [["a"], ["a", "b", "c"]])
def test_only_pairs_are_judged(texts: list[str]) -> None:
    with pytest.raises(InputError, match=rf"prompt row/7 has {len(texts)} completions"):
        judge_pairs([*PAIRS, group(7, "x", texts)], Judge([0] * 4), 60.0)


def test_no_groups_ask_no_judge() -> None:
    assert judge_pairs([], Judge(fails), 60.0) == []


def test_a_judge_is_waited_for_no_longer_than_its_time() -> None:
    def waits(*_: Any) -> list[int]:
        threading.Event().wait(5)
        return [0, 0, 0]

    with pytest.raises(InputError, match=r"judge Judge took longer than 0\.05 s"):
        judge_pairs(PAIRS, Judge(waits), 0.05)


def test_a_judge_whose_parameters_do_not_fit_gets_advice() -> None:
    class Short:
        def judge(self, prompts: list[str]) -> list[int]:
            return [0] * len(prompts)

    with pytest.raises(InputError, match=r"it is called as judge\(prompts, completions, shuffle_order=…\)"):
        judge_pairs(PAIRS, Short(), 5.0)  # type: ignore[arg-type]
