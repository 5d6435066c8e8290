"""Rollout groups and their scores in JSON types and arrays, and back, for ranks that did not sample or score them.

`training/generate/source.py` sends them through `rollouts/ranks.py`. Prompts are not sent, because every rank has the same
prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.tokens.arrays import cut, flags, joined

# Each column is one array: the values of all completions, concatenated.
_COLUMNS = ("token_ids", "logprobs", "weight_versions")


def groups_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Groups, named by the ids of their prompts. Each column of values per token is one array for all completions."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for rollout in rollouts]
    masks = [c.sampled for c in completions if c.sampled is not None]
    return {
        "prompts": [[group.prompt.prompt_id, len(group.rollouts)] for group in groups],
        "samples": [c.key.sample for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "texts": [rollout.text for rollout in rollouts],
        "masked": [c.sampled is not None for c in completions],
        "lengths": np.array([len(c.token_ids) for c in completions], dtype=np.int64),
        "sampled": joined(masks) if masks else flags([]),
        **({name: joined([getattr(c, name) for c in completions]) for name in _COLUMNS} if completions else {}),
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


def _rollouts(data: Mapping[str, Any], prompts: Sequence[Prompt]) -> Iterator[Rollout]:
    """One rollout per entry of `prompts`, in which each prompt is repeated once per completion."""
    if not prompts:
        return
    lengths, masked = data["lengths"], np.array(data["masked"], dtype=np.bool_)
    masks = iter(cut(data["sampled"], lengths[masked]))
    columns = zip(*(cut(data[name], lengths) for name in _COLUMNS), strict=True)
    rows = zip(prompts, data["samples"], data["finish_reasons"], data["texts"], masked.tolist(), columns, strict=True)
    for prompt, sample, reason, text, has_mask, (ids, logprobs, versions) in rows:
        key, mask = RequestKey(prompt.prompt_id, sample), next(masks) if has_mask else None
        yield Rollout(Completion(key, prompt.ids, ids, logprobs, versions, reason, mask), text)


def scores_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, Any]]:
    """Scores, reward and extras of each rollout, by the name of the request.

    Raises:
        InputError: a reward function logged an extra that cannot be sent.
    """
    found = {
        str(r.completion.key): {"scores": dict(r.scores), "reward": r.reward, "extra": dict(r.extra)}
        for group in groups
        for r in group.rollouts
    }
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"log_extra: with several processes, values must be numbers, text, lists or mappings of these ({error})"
        ) from error
    return found


def scores_from_wire(data: Sequence[Mapping[str, Any]], groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with the scores from all ranks.

    Args:
        data: the `scores_to_wire` of each rank.

    Raises:
        ProofError: a rollout was scored on no rank, or on several.
    """
    found = {name: scored for part in data for name, scored in part.items()}
    names = sorted(str(r.completion.key) for group in groups for r in group.rollouts)
    if sorted(name for part in data for name in part) != names:
        raise ProofError(
            "keys",
            f"{len(found)} scores arrived for {len(names)} rollouts",
            "the ranks disagree on which rank scores which rollouts",
            "this is a defect of Lockstep: report it",
        )
    return [replace(g, rollouts=tuple(replace(r, **found[str(r.completion.key)]) for r in g.rollouts)) for g in groups]
