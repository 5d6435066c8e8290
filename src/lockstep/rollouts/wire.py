"""Converts rollout groups and their scores to JSON types and back, for ranks that did not sample or score them.

`training/generate/source.py` sends them through `rollouts/ranks.py`. Prompts are not sent, because every rank has the same
prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.engines.protocol import Completion, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup


def groups_to_wire(groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
    """Groups as JSON types; a prompt is named by its id."""
    return [
        {
            "prompt": group.prompt.prompt_id,
            "rollouts": [
                {
                    "sample": r.completion.key.sample,
                    "token_ids": r.completion.token_ids,
                    "logprobs": r.completion.logprobs,
                    "weight_versions": r.completion.weight_versions,
                    "finish_reason": r.completion.finish_reason,
                    "sampled": r.completion.sampled,
                    "text": r.text,
                }
                for r in group.rollouts
            ],
        }
        for group in groups
    ]


def groups_from_wire(data: Sequence[dict[str, Any]], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """The groups of these prompts, in the order of the prompts.

    Raises:
        ProofError: the data belong to other prompts.
    """
    by_id = {group["prompt"]: group for group in data}
    if sorted(by_id) != sorted(prompt.prompt_id for prompt in prompts):
        raise ProofError(
            "keys",
            "rollouts arrived for other prompts than those of this rank",
            "the ranks do not read the same data in the same order",
            "give every rank the same dataset, seed and configuration",
        )
    return [RolloutGroup(p, tuple(_rollout(p, r) for r in by_id[p.prompt_id]["rollouts"])) for p in prompts]


def _rollout(prompt: Prompt, data: dict[str, Any]) -> Rollout:
    completion = Completion(
        key=RequestKey(prompt.prompt_id, data["sample"]),
        prompt_ids=prompt.ids,
        token_ids=tuple(data["token_ids"]),
        logprobs=tuple(data["logprobs"]),
        weight_versions=tuple(data["weight_versions"]),
        finish_reason=data["finish_reason"],
        sampled=tuple(data["sampled"]) if data["sampled"] is not None else None,
    )
    return Rollout(completion, data["text"])


def scores_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, Any]]:
    """Scores, reward and extras of each rollout, by the name of its request.

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
