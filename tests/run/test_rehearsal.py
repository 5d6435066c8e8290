"""Reward functions and judges are called once before a model is loaded, and their errors are reported then."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import start
from datasets import Dataset
from methods import FIELDS, PAIRS, make
from transformers import TrainerState

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.run.data.rehearsal import rehearse_functions
from lockstep.tasks.rewards import accuracy, exact_match

NOWHERE = "/no/such/model"
ENGINE: Any = None


class Judge:
    def __init__(self, verdicts: list[Any]) -> None:
        self._verdicts = verdicts

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[Any]:
        return self._verdicts


async def late(**_: Any) -> list[float]:
    return []


@pytest.mark.parametrize("method", FIELDS)
def test_scores_of_the_wrong_number_are_named_before_a_model_is_loaded(tmp_path: Path, method: str) -> None:
    with pytest.raises(
        InputError, match=r"returned 0 scores for \d completions? \(in a rehearsal before any model"
    ):
        make(method, NOWHERE, tmp_path, ENGINE, FIELDS[method], reward_funcs=lambda **_: [])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (late, "reward function late returned 0 scores"),
        (lambda completions, **_: ["good" for _ in completions], "returned 'good', not a number"),
        (lambda completions, answer, **_: [1.0 for _ in completions], "raised TypeError: .*'answer'"),
        (lambda **_: None, "returned NoneType, not a list of numbers"),
        (lambda completions: [1.0 for _ in completions], "raised TypeError: .*unexpected keyword argument"),
        (lambda **_: sys.exit(0), "raised SystemExit: 0"),
        ([lambda completions, **_: [1.0] * len(completions), late], "reward function late returned 0 scores"),
    ],
)
def test_whatever_a_function_gets_wrong_is_named_before_a_model_is_loaded(
    tmp_path: Path, function: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make("GRPO", NOWHERE, tmp_path, ENGINE, FIELDS["GRPO"], reward_funcs=function)


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (["first"], "returned 'first'"),
        ([0, 1], "returned 2 verdicts for 1 pairs"),
        ([2], "returned 2, not 0 or 1"),
    ],
)
def test_a_judge_that_answers_something_else_is_named_before_a_model_is_loaded(
    tmp_path: Path, verdicts: list[Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make("OnlineDPO", NOWHERE, tmp_path, ENGINE, PAIRS, reward_funcs=None, judge=Judge(verdicts))


def test_without_a_rehearsal_and_with_one_that_passes_the_model_is_what_is_missing(tmp_path: Path) -> None:
    fields = {**FIELDS["GRPO"], "rehearse_rewards": False}
    with pytest.raises(InputError, match="/no/such/model does not exist"):
        make("GRPO", NOWHERE, tmp_path, ENGINE, fields, reward_funcs=lambda **_: [])
    with pytest.raises(InputError, match="/no/such/model does not exist"):
        make("GRPO", NOWHERE, tmp_path, ENGINE, FIELDS["GRPO"])


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("2 + 2 =", "2 + 2 ="), (MESSAGES, [{"role": "assistant", "content": "2 + 2?"}])],
    ids=["text", "messages"],
)
def test_a_function_is_called_as_in_training_with_the_first_row(
    tmp_path: Path, prompt: Any, completion: Any
) -> None:
    calls: list[dict[str, Any]] = []

    def reward(**given: Any) -> list[float]:
        calls.append(given)
        return [1.0] * len(given["completions"])

    data = Dataset.from_list([{"prompt": prompt, "answer": "4"}, {"prompt": prompt, "answer": "5"}])
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=3, num_generations=3, bf16=False
    )
    rehearse_functions([reward], data, config)
    (call,) = calls
    assert call["prompts"] == [prompt] * 3
    assert call["completions"] == [completion] * 3
    assert call["answer"] == ["4"] * 3
    assert len(call["completion_ids"]) == 3
    assert isinstance(call["trainer_state"], TrainerState)
    state = call["trainer_state"]
    assert (state.global_step, state.max_steps, state.num_train_epochs, state.epoch) == (0, 6, 3, 0.0)
    assert set(call) - {"prompts", "completions", "completion_ids", "answer", "trainer_state"} == {
        "log_metric",
        "log_extra",
    }


def test_a_function_that_raises_at_made_up_text_is_told_of_and_no_reason_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def parsed(completions: list[str], **_: Any) -> list[float]:
        return [json.loads(text)["score"] for text in completions]

    class Raising:
        def judge(
            self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
        ) -> list[int]:
            raise KeyError("unknown")

    for method, arguments in (
        ("GRPO", {"reward_funcs": parsed}),
        ("OnlineDPO", {"reward_funcs": None, "judge": Raising()}),
    ):
        with pytest.raises(InputError, match="/no/such/model does not exist"):
            make(method, NOWHERE, tmp_path, ENGINE, FIELDS[method], **arguments)
    said = capsys.readouterr().out
    assert "reward function parsed raised JSONDecodeError" in said
    assert "judge Raising raised KeyError" in said
    assert said.count("raised in training, it ends the run") == 2


@pytest.mark.parametrize("prompt", [3, [], ["a", "b"], [{"content": "x"}], {"a": "b"}, [{"role": "user"}]])
def test_a_row_that_is_no_prompt_is_left_to_the_check_that_names_it(tmp_path: Path, prompt: Any) -> None:
    data = Dataset.from_list([{"prompt": prompt}] * 2)
    with pytest.raises(InputError, match="/no/such/model does not exist"):
        make("GRPO", NOWHERE, tmp_path, ENGINE, FIELDS["GRPO"], train_dataset=data)


def test_what_is_said_in_a_rehearsal_is_not_logged(untied_dir: str, tmp_path: Path) -> None:
    engine: Engine = start("transformers", untied_dir)
    told: list[float] = []

    def reward(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        told.append(float(len(told)))
        log_metric("told", told[-1])
        return [float(len(text)) for text in completions]

    fields = {**FIELDS["GRPO"], "max_steps": 2, "recheck_rewards": False}
    run = make("GRPO", untied_dir, tmp_path, engine, fields, reward_funcs=reward)
    assert told == [0.0]
    run.train()
    assert [log["told"] for log in run.state.log_history if "loss" in log] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "columns", "said"),
    [
        (exact_match, {"answer": [None] * 8}, "8 of 8 rows of the train dataset .*'answer': 8 with null"),
        (
            exact_match,
            {"answer": ["1", "", " ", None] * 2},
            "6 of 8 .* 2 with null.* and 4 with an empty text",
        ),
        (accuracy, {"solution": [None] * 8, "answer": ["1"] * 8}, "8 of 8 .*'solution'"),
        (exact_match, {"answer": ["1"] * 8}, ""),
        (lambda completions, **_: [1.0] * len(completions), {"answer": [None] * 8}, ""),
    ],
)
def test_rows_without_an_answer_for_a_built_in_function_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: Any, columns: Any, said: str
) -> None:
    data = Dataset.from_dict({"prompt": [f"p{i}" for i in range(8)], **columns})
    with pytest.raises(InputError, match="/no/such/model does not exist"):
        make("GRPO", NOWHERE, tmp_path, ENGINE, FIELDS["GRPO"], reward_funcs=function, train_dataset=data)
    lines = [line for line in capsys.readouterr().out.splitlines() if "have no answer" in line]
    assert len(lines) == bool(said)
    assert re.search(said, "".join(lines))
