"""Rollout groups and their scores in JSON types and arrays, and back, for ranks that did not sample or score them.

Prompts are not sent, because every rank has the same prompts (`training/data/prompts.py` compares them).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.across_ranks.pictures_wire import pictures_from_wire, pictures_to_wire
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, Seal, TurnEnd
from lockstep.tokens.arrays import cut, flags, joined, small_ids, whole_numbers
from lockstep.tokens.kept_ids import KeptIds, joined_kept_ids

# Each column is one array: the values of all branches of all rollouts, concatenated.
_COLUMNS = ("token_ids", "logprobs", "weight_versions")


def groups_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Groups, named by the ids of their prompts. Each column of values per token is one array for all branches.

    Raises:
        InputError: the notes of a rollout cannot be sent.
    """
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    rollouts = [rollout for _, rollout in pairs]
    branches = [completion for rollout in rollouts for completion in rollout.branches]
    masks = [c.sampled for c in branches if c.sampled is not None]
    # A first branch usually has the prompt of the data set. Every other prompt is sent.
    own = [c is not r.completion or not np.array_equal(c.prompt_ids, p.ids) for p, r in pairs for c in r.branches]
    prompts = [c.prompt_ids for c, is_own in zip(branches, own, strict=True) if is_own]
    notes = [dict(rollout.notes) for rollout in rollouts]
    _check_json(notes, "conversation.notes")
    return {
        "prompts": [[group.prompt.prompt_id, len(group.rollouts)] for group in groups],
        "samples": [rollout.key.sample for rollout in rollouts],
        "texts": [rollout.text for rollout in rollouts],
        "turns": [list(map(list, rollout.turns)) for rollout in rollouts],
        "notes": notes,
        "seals": [None if r.seal is None else [r.seal.words, dict(r.seal.tokens)] for r in rollouts],
        "branches": [len(rollout.branches) for rollout in rollouts],
        "calls": [c.key.call for c in branches],
        "finish_reasons": [c.finish_reason for c in branches],
        "masked": [c.sampled is not None for c in branches],
        "lengths": np.array([len(c.token_ids) for c in branches], dtype=np.int64),
        "sampled": joined(masks) if masks else flags([]),
        "own_prompts": own,
        "prompt_lengths": np.array([len(ids) for ids in prompts], dtype=np.int64),
        "prompt_ids": joined(prompts) if prompts else whole_numbers([]),
        **pictures_to_wire([(c.pictures, p.pictures) for p, r in pairs for c in r.branches]),
        **_kept_to_wire([c.kept_ids for c in branches]),
        **({name: joined([getattr(c, name) for c in branches]) for name in _COLUMNS} if branches else {}),
    }


def groups_from_wire(data: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """The groups of these prompts, in their order.

    Raises:
        ProofError: the data belongs to other prompts, or does not have one value per token.
    """
    known = {prompt.prompt_id: prompt for prompt in prompts}
    names = [name for name, _ in data["prompts"]]
    if sorted(names) != sorted(known) or len(known) != len(prompts):
        raise ProofError(
            "keys",
            "rollouts arrived for other prompts than those of this rank",
            "the ranks do not read the same data in the same order",
            "give every rank the same dataset, seed and configuration",
        )
    try:
        rollouts = list(_rollouts(data, [known[name] for name, size in data["prompts"] for _ in range(size)]))
    except ValueError as error:
        raise ProofError(
            "keys",
            f"rollouts have come whose parts do not fit each other ({error})",
            "the ranks run different versions of Lockstep",
            "install the same version for every rank; otherwise this is a defect of Lockstep: report it",
        ) from error
    places, end = {}, 0
    for name, size in data["prompts"]:
        places[name] = slice(end, end + size)
        end += size
    return [RolloutGroup(prompt, tuple(rollouts[places[prompt.prompt_id]])) for prompt in prompts]


def _kept_to_wire(kept: Sequence[KeptIds | None]) -> dict[str, Any]:
    """The number of sets of each completion (None: it has none), and the sets of all completions, one after the other."""
    found = [sets for sets in kept if sets is not None]
    whole = joined_kept_ids(found) if found else None
    return {
        "sets": [None if sets is None else len(sets) for sets in kept],
        "kept_ids": small_ids([]) if whole is None else whole.ids,
        "kept_ends": whole_numbers([]) if whole is None else whole.ends,
    }


def _kept_from_wire(data: Mapping[str, Any]) -> Iterator[KeptIds | None]:
    """The sets of each completion, in order."""
    whole, end = KeptIds(data["kept_ids"], data["kept_ends"]), 0
    if sum(count or 0 for count in data["sets"]) != len(whole):
        raise ValueError(f"{len(whole)} sets of kept ids")
    for count in data["sets"]:
        yield None if count is None else whole.part(end, end + count)
        end += count or 0


def _rollouts(data: Mapping[str, Any], prompts: Sequence[Prompt]) -> Iterator[Rollout]:
    """One rollout per entry of `prompts`, in which each prompt is repeated once per rollout."""
    if not prompts:
        return
    lengths, masked = data["lengths"], np.array(data["masked"], dtype=np.bool_)
    masks = iter(cut(data["sampled"], lengths[masked]))
    own_prompts = iter(cut(data["prompt_ids"], data["prompt_lengths"]))
    columns = zip(*(cut(data[name], lengths) for name in _COLUMNS), strict=True)
    owns = [prompt.pictures for prompt, count in zip(prompts, data["branches"], strict=True) for _ in range(count)]
    rest = zip(masked.tolist(), _kept_from_wire(data), pictures_from_wire(data, owns), columns, strict=True)
    branches = zip(data["calls"], data["finish_reasons"], data["own_prompts"], rest, strict=True)
    names = ("samples", "texts", "turns", "notes", "seals", "branches")
    for prompt, sample, text, turns, notes, seal, count in zip(prompts, *(data[name] for name in names), strict=True):
        own: list[Completion] = []
        for call, reason, has_prompt, more in itertools.islice(branches, count):
            has_mask, sets, shown, (ids, logprobs, versions) = more
            before, mask = next(own_prompts) if has_prompt else prompt.ids, next(masks) if has_mask else None
            key = RequestKey(prompt.prompt_id, sample, call)
            own.append(Completion(key, before, ids, logprobs, versions, reason, mask, sets, shown))
        yield Rollout(
            own[0],
            text,
            further=tuple(own[1:]),
            turns=tuple(TurnEnd(*turn) for turn in turns),
            notes=notes,
            seal=_seal_from(seal),
        )
    if next(branches, None) is not None:
        raise ValueError("there are more branches than the rollouts have")


def _seal_from(data: Any) -> Seal | None:
    return None if data is None else Seal(data[0], {name: (ids, logps) for name, (ids, logps) in data[1].items()})


def scores_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, Any]]:
    """Scores, reward and extras of each rollout, by the name of the request.

    Raises:
        InputError: a reward function logged an extra that cannot be sent.
    """
    found = {
        str(r.key): {"scores": dict(r.scores), "reward": r.reward, "extra": dict(r.extra)}
        for group in groups
        for r in group.rollouts
    }
    _check_json(found, "log_extra")
    return found


def scores_from_wire(data: Sequence[Mapping[str, Any]], groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with the scores from all ranks.

    Args:
        data: the `scores_to_wire` of each rank.

    Raises:
        ProofError: a rollout was scored on no rank, or on several.
    """
    found = {name: scored for part in data for name, scored in part.items()}
    names = sorted(str(r.key) for group in groups for r in group.rollouts)
    if sorted(name for part in data for name in part) != names:
        raise ProofError(
            "keys",
            f"{len(found)} scores arrived for {len(names)} rollouts",
            "the ranks disagree on which rank scores which rollouts",
            "this is a defect of Lockstep: report it",
        )
    return [replace(g, rollouts=tuple(replace(r, **found[str(r.key)]) for r in g.rollouts)) for g in groups]


def _check_json(values: Any, what: str) -> None:
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what}: with several processes, values must be numbers, text, lists or mappings of these ({error})"
        ) from error
