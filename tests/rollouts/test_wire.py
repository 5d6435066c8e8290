"""Scores that are sent between ranks: each reaches its own rollout unchanged, or there is a clear error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.images.pictures import NO_PICTURES, Picture, PromptPictures
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, TurnEnd, seal_of
from lockstep.rollouts.wire import (
    decode,
    encode,
    groups_from_wire,
    groups_to_wire,
    scores_from_wire,
    scores_to_wire,
)
from lockstep.tokens.arrays import KeptIds


def groups(count: int = 3) -> list[RolloutGroup]:
    found = []
    for i in range(count):
        prompt = Prompt(f"train/{i}", (1, 2 + i), f"say {i}")
        keys = [RequestKey(prompt.prompt_id, sample) for sample in range(2)]
        completions = [Completion(key, prompt.ids, (5, 6), (-0.1, -1 / 3), (4, 4), "stop") for key in keys]
        rollouts = [Rollout(c, f"text {c.key}") for c in completions]
        found.append(RolloutGroup(prompt, tuple(replace(r, seal=seal_of(r, prompt)) for r in rollouts)))
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
            group,
            rollouts=(replace(first, completion=replace(first.completion, sampled=(False, True))), second),
        )

    sent = [partly(group) for group in groups()]
    # As it goes from rank to rank.
    arrived = groups_from_wire(decode(encode(groups_to_wire(sent))), [group.prompt for group in sent])
    assert arrived == sent
    for group in arrived:
        first, second = (r.completion.sampled for r in group.rollouts)
        assert first is not None
        assert (first.tolist(), second) == ([False, True], None)


def test_kept_ids_arrive_with_their_completion_and_nowhere_else() -> None:
    def filtered(group: RolloutGroup, first: KeptIds) -> RolloutGroup:
        one, two = group.rollouts
        return replace(
            group, rollouts=(replace(one, completion=replace(one.completion, kept_ids=first)), two)
        )

    sets = [KeptIds([5, 6, 7, 1, 6], [3, 5]), KeptIds([5, 6], [1, 2]), KeptIds([5, 6, 9], [1, 3])]
    sent = [filtered(group, kept) for group, kept in zip(groups(), sets, strict=True)]
    arrived = groups_from_wire(decode(encode(groups_to_wire(sent))), [group.prompt for group in sent])
    assert arrived == sent
    assert [r.completion.kept_ids for group in arrived for r in group.rollouts] == [
        sets[0], None, sets[1], None, sets[2], None
    ]  # fmt: skip
    short = {**groups_to_wire(sent), "sets": [2, None, 2, None, 1, None]}
    with pytest.raises(ProofError, match="6 sets of kept ids"):
        groups_from_wire(short, [group.prompt for group in sent])


def test_a_prompt_that_an_environment_extended_arrives_with_its_rollout_and_notes_too() -> None:
    (group, *others) = groups()
    first, second = group.rollouts
    longer = replace(first.completion, prompt_ids=(1, 2, 9, 9))
    changed = replace(first, completion=longer, notes={"rewards": {"Guess": 1.0}, "environment": 2**61})
    sent = [replace(group, rollouts=(changed, second)), *others]
    assert groups_from_wire(decode(encode(groups_to_wire(sent))), [g.prompt for g in sent]) == sent


def test_branches_and_notes_arrive_with_their_rollouts() -> None:
    def grown(group: RolloutGroup) -> RolloutGroup:
        first, second = group.rollouts
        key = RequestKey(group.prompt.prompt_id, 1)
        others = tuple(
            Completion(key._replace(call=n), (7,) * n, (8, n), (0.0, -0.5), (4, 5), "length", mask)
            for n, mask in ((2, (False, True)), (3, None))
        )
        second = replace(
            second,
            further=others,
            turns=(TurnEnd(0, 1, "stop"), TurnEnd(2, 2, "length")),
            notes={"reward": 0.5},
        )
        empty = Completion(first.completion.key, group.prompt.ids, (), (), (), "stop")
        return replace(group, rollouts=(replace(first, completion=empty), second))

    sent = [grown(group) for group in groups()]
    arrived = groups_from_wire(decode(encode(groups_to_wire(sent))), [group.prompt for group in sent])
    assert arrived == sent
    data = groups_to_wire(sent)
    with pytest.raises(ProofError, match="parts do not fit each other"):
        groups_from_wire({**data, "branches": [1] * len(data["branches"])}, [group.prompt for group in sent])
    first, second = sent[0].rollouts
    unsendable = replace(sent[0], rollouts=(first, replace(second, notes={"tool": object()})))
    with pytest.raises(InputError, match=r"conversation\.notes: with several processes"):
        groups_to_wire([unsendable])


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


def shown(*seeds: int) -> PromptPictures:
    """Pictures of one placeholder each, at the beginning of a prompt."""
    made = tuple(
        Picture(torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)), torch.tensor([1, 2, 2]), 1)
        for seed in seeds
    )
    places = np.arange(len(seeds))
    return PromptPictures(made, places, 7, np.zeros((3, len(seeds)), dtype=np.int64), -2)


def seeing_groups() -> list[RolloutGroup]:
    """Prompts with two pictures, with one, and without.

    One rollout of the second prompt was shown a further picture.
    """
    found = []
    for group, pictures in zip(groups(), (shown(0, 1), shown(2), NO_PICTURES), strict=True):
        prompt = replace(group.prompt, pictures=pictures)
        rollouts = tuple(
            replace(r, completion=replace(r.completion, pictures=pictures)) for r in group.rollouts
        )
        found.append(RolloutGroup(prompt, rollouts))
    one, two = found[1].rollouts
    later = Completion(two.key._replace(call=1), (7, 7), (5,), (-0.1,), (4,), "stop", pictures=shown(2, 3))
    return [found[0], replace(found[1], rollouts=(one, replace(two, further=(later,)))), found[2]]


def arrived(data: dict[str, Any], sent: list[RolloutGroup]) -> list[RolloutGroup]:
    return groups_from_wire(decode(encode(data)), [group.prompt for group in sent])


def test_each_completion_finds_the_pictures_of_its_prompt_and_only_others_are_sent() -> None:
    sent = seeing_groups()
    data = groups_to_wire(sent[::-1])
    (only,) = data["pictures"]
    assert np.array_equal(only["pixel_values"], shown(3).pictures[0].pixel_values)
    for mine, theirs in zip(sent, arrived(data, sent), strict=True):
        for one, other in zip(mine.rollouts, theirs.rollouts, strict=True):
            assert other.completion.pictures is mine.prompt.pictures
            for own, found in zip(one.further, other.further, strict=True):
                assert found.pictures.digests == own.pictures.digests
                assert np.array_equal(found.pictures.places, own.pictures.places)
                assert np.array_equal(found.pictures.positions_of(9), own.pictures.positions_of(9))


@pytest.mark.parametrize("fault", ["changed", "missing", "fewer", "blind"])
def test_pictures_that_do_not_arrive_as_they_were_sent_are_refused(fault: str) -> None:
    sent = seeing_groups()
    data = groups_to_wire(sent)
    (later,) = data["pictures"]
    if fault == "changed":
        data["pictures"] = [{**later, "pixel_values": -later["pixel_values"]}]
    elif fault == "missing":
        data["pictures"] = []
    elif fault == "fewer":
        data["shown"] = data["shown"][:-1]
    else:
        sent = [
            *sent[:2],
            *(replace(group, prompt=replace(group.prompt, pictures=NO_PICTURES)) for group in sent[2:]),
        ]
        data["shown"] = [*data["shown"][:-1], data["shown"][0]]
    with pytest.raises(ProofError, match="parts do not fit each other"):
        arrived(data, sent)
