"""Prompts, rollouts and groups, and the seal that a rollout bears from its sampling to its loss.

A group is an object; no code derives groups from an order. A seal has digests of what was sampled, and of the text and
the row that the rewards belong to. It is made when the engine's last answer is in, and stays with the rollout through
other ranks and reward functions. The digests are made again from the scored groups and from the tensors of the loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lockstep.contract.protocol import Completion, FinishReason, RequestKey
from lockstep.images.pictures import NO_PICTURES, PromptPictures
from lockstep.tokens.arrays import ArrayFields, Ids, digest_of, joined, whole_numbers


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(ArrayFields):
    """One row of a dataset, ready for an engine.

    Attributes:
        prompt_id: names the row in every request; unique within a dataset.
        ids: (P,) int64, the prompt's token ids, read-only. The constructor accepts any sequence of integers.
        source: the row's `prompt` as in the dataset (text or messages), for reward functions.
        columns: the row's other columns, for reward functions.
        pictures: the row's pictures, whose placeholders are in `ids`.
    """

    prompt_id: str
    ids: Ids
    source: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    pictures: PromptPictures = NO_PICTURES

    def __post_init__(self) -> None:
        self._set("ids", whole_numbers(self.ids))


class TurnEnd(NamedTuple):
    """Where one answer of the engine ends in its rollout, and why.

    Attributes:
        branch: index in `Rollout.branches`.
        end: number of ids of this branch (`Completion.token_ids`) up to the last id of the answer.
    """

    branch: int
    end: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Seal:
    """Digests of a rollout as it was when the engine's last answer was in.

    Attributes:
        words: of the key, the text and the row.
        tokens: for each branch with sampled tokens, by its name: of its ids and their places, and of its log-probs.
    """

    words: str
    tokens: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout of a prompt, with its scores and reward: a tree of ids, mostly of one branch.

    Further branches exist where the program continued from ids that do not extend the earlier ones. Each sampled id is
    marked as sampled in exactly one branch.

    Attributes:
        completion: the first branch. Its key is the key of the rollout.
        text: the decoded ids of all branches, for reward functions and reports. It is never encoded again.
        scores: one score per reward function, by name. None: the function gave no score.
        reward: weighted sum of the scores. NaN: there is no score, or the rollout is not scored yet. A rollout without
            a reward is in no baseline and has no advantage. (A KL or entropy term of the loss also covers its tokens.)
        extra: values that reward functions logged for this rollout with `log_extra`, by column.
        further: the other branches, in the order in which they were begun.
        turns: the end of each of the engine's answers, in the order in which they came.
        notes: what the program kept, in JSON types: `messages` after the prompt, `finish_reasons` of their assistant's
            turns, `prompt` if it differs from the row's, `columns` for reward functions, `rewards` of an environment by
            its class, `failed` if an environment failed, and counts.
        seal: what the loss must be computed from; None: the rollout was not made by the driver or by a `rollout_func`.
    """

    completion: Completion
    text: str
    scores: Mapping[str, float | None] = field(default_factory=dict)
    reward: float = float("nan")
    extra: Mapping[str, Any] = field(default_factory=dict)
    further: tuple[Completion, ...] = ()
    turns: tuple[TurnEnd, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    seal: Seal | None = None

    @property
    def key(self) -> RequestKey:
        """Prompt id and sample."""
        return self.completion.key

    @property
    def branches(self) -> tuple[Completion, ...]:
        """All branches, the first one included."""
        return (self.completion, *self.further)

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """The finish reason of each of the engine's answers, in their order."""
        return tuple(turn.finish_reason for turn in self.turns)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last branch ended. `length`: the rollout ran out of room."""
        return self.branches[-1].finish_reason

    @property
    def token_ids(self) -> Ids:
        """The ids that the rollout added to its prompts: sampled and inserted ones, one branch after the other."""
        return joined([c.token_ids for c in self.branches])

    @property
    def failed(self) -> str | None:
        """Why the rollout could not be finished; None if it was. A failed rollout has no reward and no gradient."""
        return self.notes.get("failed")

    @property
    def scored(self) -> bool:
        """Whether a reward function gave this rollout a score."""
        return not math.isnan(self.reward)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        strangers = [r.key for r in self.rollouts if r.key.prompt_id != self.prompt.prompt_id]
        if strangers:
            raise ValueError(f"rollout {strangers[0]} does not belong to prompt {self.prompt.prompt_id}")

    @property
    def rewards(self) -> list[float]:
        """Reward of each rollout, in order. NaN: the rollout has no reward."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def given_rewards(self) -> list[float]:
        """Rewards of the rollouts that have one, in order."""
        return [rollout.reward for rollout in self.rollouts if rollout.scored]


def seal_of(rollout: Rollout, prompt: Prompt) -> Seal:
    """The seal of a rollout as it is now."""
    tokens = {str(c.key): tokens_of(c) for c in rollout.branches if len(c.sampled_places)}
    return Seal(words_of(rollout.key, rollout.text, row_of(prompt)), tokens)


def row_of(prompt: Prompt) -> str:
    """Digest of a row: its prompt id, token ids and columns. A value that is no JSON type counts with its type."""
    row = [prompt.source, dict(prompt.columns)]
    text = json.dumps(row, default=lambda value: type(value).__qualname__, sort_keys=True)
    return digest_of(prompt.prompt_id, prompt.ids, text)


def words_of(key: RequestKey, text: str, row: str) -> str:
    """Digest of the text of a rollout and of its row, which is given as the digest of `row_of`."""
    return digest_of(str(key), text, row)


def tokens_of(completion: Completion) -> tuple[str, str]:
    """Digests of a branch: of the ids and positions that its log-probs depend on, and of the engine's log-probs."""
    # A model reads the ids up to the one that predicts the last sampled token.
    places, before = completion.sampled_places, len(completion.prompt_ids)
    path = joined([completion.prompt_ids, completion.token_ids[: places[-1]]])
    name, targets = str(completion.key), completion.token_ids[places]
    ids = digest_of(name, path, np.arange(len(path), dtype=np.int64), before - 1 + places, targets)
    return ids, digest_of(name, completion.sampled_logprobs)
