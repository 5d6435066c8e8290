"""What a user's `rollout_func` returns becomes rollouts, or one clear error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tokenizer

from lockstep.errors import InputError
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.programs.rollout_func import Bounds, groups_of_columns

BOUNDS = Bounds(vocabulary=50, completion=6, context=12, end_ids=(0,))
PROMPTS = [Prompt(f"row/{i}", (1, 2), f"question {i}", {"answer": i}) for i in range(2)]


def columns(**changed: Any) -> dict[str, Any]:
    """Two rollouts of two prompts; `None` leaves a column out."""
    made = {
        "prompt_ids": [[1, 2, 3], [1, 2], [4, 5], [4, 5, 6]],
        "completion_ids": [[10, 0], [11, 12, 13], [14], [15, 16, 0]],
        "logprobs": [[-0.1, -0.2], [-0.3, -0.4, -0.5], [-0.6], [-0.7, -0.8, -0.9]],
    }
    return {name: values for name, values in {**made, **changed}.items() if values is not None}


def groups(given: Any) -> list[RolloutGroup]:
    reader = PromptReader(make_tokenizer())
    return groups_of_columns(
        given, PROMPTS, 2, 7, BOUNDS, lambda ids: f"text {np.asarray(ids).tolist()}", reader
    )


def test_rows_become_rollouts_of_their_prompts_in_trls_order() -> None:
    found = groups(columns())
    assert [group.prompt.prompt_id for group in found] == ["row/0", "row/1"]
    rollouts = [rollout for group in found for rollout in group.rollouts]
    assert [str(r.key) for r in rollouts] == ["row/0#0", "row/0#1", "row/1#0", "row/1#1"]
    assert [r.completion.prompt_ids.tolist() for r in rollouts] == columns()["prompt_ids"]
    assert [r.completion.token_ids.tolist() for r in rollouts] == columns()["completion_ids"]
    assert [r.completion.logprobs.tolist() for r in rollouts] == [
        pytest.approx(row) for row in columns()["logprobs"]
    ]
    assert [r.finish_reason for r in rollouts] == ["stop", "length", "length", "stop"]
    assert {int(v) for r in rollouts for v in r.completion.weight_versions} == {7}
    assert rollouts[0].text == "text [10, 0]"
    assert rollouts[0].completion.sampled is None


def test_env_mask_marks_what_was_not_sampled_and_its_log_probs_are_not_read() -> None:
    nan = float("nan")
    given = columns(
        env_mask=[[1, 1], [1, 0, 1], [1], [1, 0, 0]],
        logprobs=[[-0.1, -0.2], [-0.3, nan, -0.5], [-0.6], [-0.7, None, 5.0]],
    )
    first, second = (group.rollouts for group in groups(given))
    assert first[0].completion.sampled is None
    assert first[1].completion.sampled is not None
    assert first[1].completion.sampled.tolist() == [True, False, True]
    assert first[1].completion.logprobs.tolist() == pytest.approx([-0.3, 0.0, -0.5])
    assert second[1].completion.sampled_logprobs.tolist() == pytest.approx([-0.7])


def test_tensors_and_arrays_are_taken_like_lists() -> None:
    given = columns()
    found = groups({name: [torch.tensor(row) for row in rows] for name, rows in given.items()})
    assert found == groups({name: [np.array(row) for row in rows] for name, rows in given.items()})


def test_other_columns_go_to_reward_functions_by_rollout() -> None:
    found = groups(columns(env_reward=[1.0, 2.0, 3.0, 4.0], same="for all"))
    given = [rollout.notes["columns"] for group in found for rollout in group.rollouts]
    assert given == [{"env_reward": value, "same": "for all"} for value in (1.0, 2.0, 3.0, 4.0)]


def test_finish_reasons_may_be_given() -> None:
    found = groups(columns(finish_reasons=["length", "stop", "stop", "length"]))
    assert [r.finish_reason for group in found for r in group.rollouts] == [
        "length",
        "stop",
        "stop",
        "length",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2], "returned list, not a dict"),
        (columns(logprobs=None), r"must return keys \['logprobs'\]"),
        (
            columns(prompt_ids=[[1]]),
            "1 rows in 'prompt_ids' for 4 rollouts: it gets each prompt once per rollout",
        ),
        (columns(score=[1.0]), "1 rows in 'score'"),
        (
            columns(completion_ids=[[10, 50], [11], [14], [15]]),
            r"row 0 \(rollout row/0#0\): completion_ids: 50 is not a token",
        ),
        (columns(completion_ids=[[10, -1], [11], [14], [15]]), "-1 is not a token"),
        (columns(completion_ids=[[10.5, 1], [11], [14], [15]]), "give a list of token ids"),
        (
            columns(completion_ids=[[10, 0], [11, 12, 13], [], [15]]),
            r"row 2 \(rollout row/1#0\): completion_ids: there are no ids",
        ),
        (columns(completion_ids=[[1] * 7, [11], [14], [15]]), "at most 6 completion ids and 12 ids in all"),
        (columns(prompt_ids=[[1] * 11, [1], [1], [1]]), "11 prompt ids and 2 completion ids"),
        (
            columns(logprobs=[[-0.1], [-0.3] * 3, [-0.6], [-0.7] * 3]),
            "one number for each of the 2 completion ids",
        ),
        (columns(logprobs=[[-0.1, None], [-0.3] * 3, [-0.6], [-0.7] * 3]), "one number for each"),
        (columns(logprobs=[[-0.1, float("nan")], [-0.3] * 3, [-0.6], [-0.7] * 3]), "nan is not a log-prob"),
        (columns(logprobs=[[-0.1, 0.5], [-0.3] * 3, [-0.6], [-0.7] * 3]), "0.5 is not a log-prob"),
        (columns(env_mask=[[1, 2], [1] * 3, [1], [1] * 3]), "a 1 or a 0 for each of the 2 completion ids"),
        (columns(env_mask=[[1], [1] * 3, [1], [1] * 3]), "a 1 or a 0 for each"),
        (columns(env_mask=[[1, 1], [1] * 3, [0], [1] * 3]), r"row 2 .*nothing was sampled"),
        (
            columns(logprob_token_ids=[[10, 1], [11, 12, 13], [14], [15, 16, 0]]),
            "the log-probs belong to other tokens",
        ),
        (columns(finish_reasons=["eos", "stop", "stop", "stop"]), "finish_reasons has 'eos'"),
    ],
)
def test_what_is_no_rollout_is_refused_by_row(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"rollout_func.*{message}"):
        groups(given)
