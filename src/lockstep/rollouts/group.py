"""The types of rollouts: prompt, rollout and group. A group is an object; no code derives groups from an order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.engines.protocol import Completion
from lockstep.tokens.arrays import ArrayFields, Ids, whole_numbers


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(ArrayFields):
    """One row of a dataset, ready for an engine.

    Attributes:
        prompt_id: names the row in every request; unique within a dataset.
        ids: (P,) int64, the prompt's token ids, read-only. The constructor accepts any sequence of integers.
        source: the row's `prompt` as in the dataset (text or messages), for reward functions.
        columns: the row's other columns, for reward functions.
    """

    prompt_id: str
    ids: Ids
    source: Any
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._set("ids", whole_numbers(self.ids))


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a prompt, with its scores and reward.

    Attributes:
        text: the decoded completion, for reward functions and reports. It is never encoded again.
        scores: one score per reward function, by name. None: the function gave no score.
        reward: weighted sum of the scores. NaN: there is no score, or the rollout is not scored yet. A rollout without a reward
            is in no baseline and has no advantage. (A KL or entropy term in the loss also covers its tokens.)
        extra: values that reward functions logged for this rollout with `log_extra`, by column.
    """

    completion: Completion
    text: str
    scores: Mapping[str, float | None] = field(default_factory=dict)
    reward: float = float("nan")
    extra: Mapping[str, Any] = field(default_factory=dict)

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
        strangers = [r.completion.key for r in self.rollouts if r.completion.key.prompt_id != self.prompt.prompt_id]
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
