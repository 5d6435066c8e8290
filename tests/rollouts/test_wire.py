"""Scores that are sent between ranks: each reaches its own rollout unchanged, or there is a clear error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.frames import decode, encode
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.wire import groups_from_wire, groups_to_wire, scores_from_wire, scores_to_wire


def groups(count: int = 3) -> list[RolloutGroup]:
    found = []
    for i in range(count):
        prompt = Prompt(f"train/{i}", (1, 2 + i), f"say {i}")
        keys = [RequestKey(prompt.prompt_id, sample) for sample in range(2)]
        completions = [Completion(key, prompt.ids, (5, 6), (-0.1, -1 / 3), (4, 4), "stop") for key in keys]
        found.append(RolloutGroup(prompt, tuple(Rollout(c, f"text {c.key}") for c in completions)))
    return found


def scored(group: RolloutGroup, **extra: Any) -> RolloutGroup:
    rollouts = tuple(
        replace(r, scores={"f": float(len(str(r.completion.key))), "g": None}, reward=1 / 3, extra=extra)
        for r in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def test_groups_arrive_as_they_were_sent() -> None:
    prompts = [group.prompt for group in groups()]
    assert groups_from_wire(groups_to_wire(groups()[::-1]), prompts) == groups()


def test_which_tokens_were_sampled_arrives_with_them() -> None:
    def partly(group: RolloutGroup) -> RolloutGroup:
        first, second = group.rollouts
        return replace(
            group, rollouts=(replace(first, completion=replace(first.completion, sampled=(False, True))), second)
        )

    sent = [partly(group) for group in groups()]
    # As it goes from rank to rank.
    arrived = groups_from_wire(decode(encode(groups_to_wire(sent))), [group.prompt for group in sent])
    assert arrived == sent
    for group in arrived:
        first, second = (r.completion.sampled for r in group.rollouts)
        assert first is not None
        assert (first.tolist(), second) == ([False, True], None)


def test_groups_of_other_prompts_are_refused() -> None:
    with pytest.raises(ProofError, match="other prompts"):
        groups_from_wire(groups_to_wire(groups(2)), [group.prompt for group in groups(3)])


def test_scores_reach_their_rollouts_in_whatever_order_they_come() -> None:
    whole = [scored(group, place=[1, "a"]) for group in groups()]
    assert scores_from_wire([scores_to_wire(whole[2:]), {}, scores_to_wire(whole[:2])], groups()) == whole


@pytest.mark.parametrize("parts", [[slice(0, 2)], [slice(0, 2), slice(1, 3)], [slice(0, 0)]])
def test_a_rollout_that_is_scored_nowhere_or_twice_is_refused(parts: list[slice]) -> None:
    with pytest.raises(ProofError, match="disagree on which rank"):
        scores_from_wire([scores_to_wire([scored(g) for g in groups()[part]]) for part in parts], groups())


def test_an_extra_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InputError, match="log_extra: with several processes"):
        scores_to_wire([scored(groups()[0], what={1, 2})])


def test_a_missing_reward_stays_missing() -> None:
    ((first, _),) = [g.rollouts for g in scores_from_wire([scores_to_wire(groups(1))], groups(1))]
    assert math.isnan(first.reward)
