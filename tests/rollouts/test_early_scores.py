"""Groups are scored while other groups are sampled; the scores are the same as after sampling."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from scored import score_groups

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.report.waits import waiting
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.scores.early_scores import EarlyScores
from lockstep.rollouts.scores.reward_log import RewardLog
from lockstep.rollouts.scores.rewards import call_functions

PROMPTS = [Prompt(f"p{i}", (5, 6, 7 + i), f"prompt {i}", {"answer": i}) for i in range(3)]
SIZE = 2
THREAD = ThreadPoolExecutor(1)


def rollout(prompt: Prompt, sample: int) -> Rollout:
    ids = (40 + sample, 50 + prompt.columns["answer"])
    key = RequestKey(prompt.prompt_id, sample)
    return Rollout(Completion(key, prompt.ids, ids, (-1.0, -2.0), (0, 0), "length"), f"said {ids}")


ANSWERS = [rollout(prompt, sample) for prompt in PROMPTS for sample in range(SIZE)]
GROUPS = [RolloutGroup(p, tuple(rollout(p, i) for i in range(SIZE))) for p in PROMPTS]


def reward(completion_ids: list[list[int]], answer: list[int], log_metric: Any, **columns: Any) -> list[float]:
    log_metric("longest", max(len(ids) for ids in completion_ids))
    return [ids[0] + 100.0 * number for ids, number in zip(completion_ids, answer, strict=True)]


def score(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
    return call_functions(groups, [reward], log=log)


@draws(30)
@given(st.permutations(ANSWERS))
def test_in_whatever_order_answers_come_the_scores_are_those_of_one_call(answers: list[Rollout]) -> None:
    log = RewardLog()
    with EarlyScores(PROMPTS, SIZE, score, THREAD) as early:
        for answer in answers:
            early.finished(answer)
        found = early.take(GROUPS, log)
    expected = score_groups(GROUPS, [reward], [1.0])
    assert [[r.scores for r in g.rollouts] for g in found] == [[r.scores for r in g.rollouts] for g in expected]
    assert [g.prompt for g in found] == PROMPTS
    assert log.values() == {"longest": [2.0] * 3}


def test_a_group_is_scored_before_the_others_are_answered() -> None:
    scored = threading.Event()

    def tell(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
        scored.set()
        return score(groups, log)

    with EarlyScores(PROMPTS, SIZE, tell, THREAD) as early:
        early.finished(ANSWERS[0])
        assert not scored.wait(0.2), "a group was scored before it was complete"
        early.finished(ANSWERS[1])
        assert scored.wait(10), "nothing was scored while answers are missing"


def test_other_completions_in_the_end_are_refused() -> None:
    with EarlyScores(PROMPTS, SIZE, score, THREAD) as early:
        for answer in ANSWERS:
            early.finished(answer)
        other = replace(ANSWERS[0], completion=replace(ANSWERS[0].completion, token_ids=(41, 51)))
        changed = RolloutGroup(PROMPTS[0], (other, ANSWERS[1]))
        with pytest.raises(ProofError, match="are not those that were scored"):
            early.take([changed, *GROUPS[1:]], RewardLog())


def test_an_error_of_a_reward_function_is_the_callers() -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise RuntimeError("no sandbox")

    def fail(groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
        return call_functions(groups, [broken], log=log)

    with EarlyScores(PROMPTS, SIZE, fail, THREAD) as early:
        for answer in ANSWERS:
            early.finished(answer)
        with pytest.raises(InputError, match="broken raised RuntimeError: no sandbox"):
            early.take(GROUPS, RewardLog())


def test_a_generation_that_is_lost_leaves_no_thread_behind() -> None:
    with waiting("nothing"):
        # The thread that looks at waits is one per process, and stays.
        before = threading.active_count()

    def lost() -> None:
        with EarlyScores(PROMPTS, SIZE, score, THREAD) as early:
            early.finished(ANSWERS[0])
            early.finished(ANSWERS[1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lost()
    assert threading.active_count() == before
