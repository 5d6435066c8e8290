"""The training data of one completion: its ids, and the values of each sampled token.

A rollout that is a tree has one `TrainingSequence` per branch, because each branch is scored in its own context.
Advantages and weights belong to the rollout. So its branches are joined for the methods, and what the methods have
computed is split again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.images.pictures import NO_PICTURES, PromptPictures
from lockstep.tokens.arrays import (
    ArrayFields,
    Flags,
    Ids,
    KeptIds,
    Reals,
    chosen,
    cut,
    flags,
    joined,
    places_of,
    reals,
    whole_numbers,
)

_REALS = ("behaviour_logps", "advantages", "old_logps", "entropies", "ref_logps", "values", "returns")
_FLAGS = ("fresh", "kept", "sampled")
# The fields that are arrays, and what makes an array of their values.
_KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), whole_numbers),
    **dict.fromkeys(_REALS, reals),
    **dict.fromkeys(_FLAGS, flags),
}


@dataclass(frozen=True, eq=False)
class TrainingSequence(ArrayFields):
    """One completion to learn from, or only to verify. Its N tokens are the sampled ones.

    Its arrays are read-only. The constructor accepts any sequence of values of the right kind.

    Attributes:
        name: name of the request.
        prompt_ids: (P,) int64 ids before the completion.
        completion_ids: (C,) int64 sampled ids, the end token included, and the ids that were inserted between them.
        behaviour_logps: (N,) float32 log-prob of each sampled id, from the engine.
        advantages: (N,) float32 advantage of each sampled token. A method with one advantage per completion repeats it.
        weight: weight of each token in the step's loss.
        old_logps: (N,) float32 log-probs of the policy before the generation's first step. None: the log-probs of the
            training forward are used.
        entropies: (N,) float32 entropies of the policy before the generation's first step, if a pass has scored the
            sequence at that time. The proof has then already checked its tokens.
        fresh: (N,) bool, whether the weights that learn from each token have also sampled it. None: true for all
            tokens.
        ref_logps: (N,) float32 log-probs of the reference model, if the method uses one.
        kept: (N,) bool, whether the policy learns from each token. None: true for all tokens.
        values, returns: (N,) float32 value of the critic before each token, and the target of that value, if the
            method has a critic.
        unit: sequences with the same unit are adjacent and stay in one pack, because they have one common loss. None:
            the sequence is a unit alone.
        sampled: (C,) bool, whether each of `completion_ids` was sampled. None: true for all ids.
        rollout: name of the rollout, if it has several branches. They are adjacent sequences of one unit. None: the
            sequence is a whole rollout.
        kept_ids: one set of ids for each sampled token, if a filter (top-k, top-p, min-p) was in force. The trainer
            scores the token among them.
        pictures: the pictures of the prompt and of what was inserted before the last sampled id.
        picked: whether its rollout is one of those that are verified whatever their rewards are. The draws proof bets
            on its tokens.
        aside: whether it needs no forward: it has no gradient, and is not picked.

    Raises:
        BadValues: a field has values of another kind than integers, numbers or booleans, as its type requires.
    """

    name: str
    prompt_ids: Ids
    completion_ids: Ids
    behaviour_logps: Reals
    advantages: Reals = field(default_factory=lambda: reals([]))
    weight: float = 0.0
    old_logps: Reals | None = None
    entropies: Reals | None = None
    fresh: Flags | None = None
    ref_logps: Reals | None = None
    kept: Flags | None = None
    values: Reals | None = None
    returns: Reals | None = None
    unit: str | None = None
    sampled: Flags | None = None
    rollout: str | None = None
    kept_ids: KeptIds | None = None
    pictures: PromptPictures = NO_PICTURES
    picked: bool = True
    aside: bool = False

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            values = getattr(self, name)
            if values is not None:
                self._set(name, kind(values))

    def but(self, **changes: Any) -> TrainingSequence:
        """A copy with other values in some fields. Unlike `dataclasses.replace`, it checks these fields alone."""
        copied, values = object.__new__(TrainingSequence), self.__dict__
        if unknown := changes.keys() - values.keys():
            raise AttributeError(f"a training sequence has no {', '.join(sorted(unknown))}")
        for name, value in changes.items():
            changes[name] = _KINDS[name](value) if value is not None and name in _KINDS else value
        # Without slots, the fields are one dictionary, which Python copies at once.
        copied.__dict__.update(values, **changes)
        return copied

    @property
    def length(self) -> int:
        """N: number of sampled ids."""
        return len(self.completion_ids) if self.sampled is None else int(np.count_nonzero(self.sampled))

    @property
    def sampled_ids(self) -> Ids:
        """(N,) sampled ids."""
        return chosen(self.completion_ids, self.sampled)

    @property
    def path(self) -> Ids:
        """The ids that a model needs as input to predict all sampled tokens."""
        return joined([self.prompt_ids, self.completion_ids[: self._places[-1]]])

    @property
    def predictors(self) -> Ids:
        """(N,) position in `path` at which each sampled token is predicted."""
        return len(self.prompt_ids) - 1 + self._places

    @property
    def _places(self) -> Ids:
        return places_of(self.sampled, len(self.completion_ids))


def rollouts_of(sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
    """The sequences of each rollout, in order."""
    return [list(own) for _, own in itertools.groupby(sequences, lambda s: s.rollout or s.name)]


def flat(sequences: Sequence[TrainingSequence], name: str) -> np.ndarray:
    """(N,) values of the field `name`, one value per token, one sequence after the other.

    Raises:
        ValueError: the field of a sequence is None, or does not have one value per token.
    """
    columns = [getattr(s, name) for s in sequences]
    for sequence, values in zip(sequences, columns, strict=True):
        if values is None or len(values) != sequence.length:
            raise ValueError(f"sequence {sequence.name} has no {name} for each of its tokens")
    return np.concatenate(columns) if columns else np.empty(0, np.float32)


def column(
    sequences: Sequence[TrainingSequence], name: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(N,) `flat` as a tensor. Use float64 if the caller subtracts values that are close to each other."""
    return torch.from_numpy(flat(sequences, name)).to(dtype)


# Values per sampled token that exist before advantages are computed, and those that methods add.
_SCORED = ("behaviour_logps", "old_logps", "entropies", "fresh", "ref_logps", "values")
_ADDED = ("advantages", "returns", "kept")


def joined_branches(name: str, branches: Sequence[TrainingSequence]) -> TrainingSequence:
    """All sampled tokens of a rollout as one sequence, one branch after the other; without any branch, without tokens.

    The result has no inserted ids and is in no context: it must not be scored.
    """
    nothing = whole_numbers([])
    if not branches:
        columns: dict[str, Any] = {field: reals([]) for field in _SCORED if field != "fresh"}
        return TrainingSequence(name, prompt_ids=nothing, completion_ids=nothing, **columns)
    known = [field for field in _SCORED if getattr(branches[0], field) is not None]
    columns = {field: joined([getattr(b, field) for b in branches]) for field in known}
    ids = joined([b.sampled_ids for b in branches])
    return TrainingSequence(name, prompt_ids=nothing, completion_ids=ids, **columns)


def split_branches(whole: TrainingSequence, branches: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The branches, with the weight and the values per token that a method has added to the joined sequence.

    The branches of one rollout stay in one pack, because some losses have one ratio per rollout.
    """
    lengths = [b.length for b in branches]
    added: dict[str, list[Any]] = {
        field: cut(values, lengths) for field in _ADDED if (values := getattr(whole, field)) is not None
    }
    unit = whole.unit if whole.unit is not None else whole.name
    return [
        b.but(weight=whole.weight, unit=unit, **{field: parts[i] for field, parts in added.items()})
        for i, b in enumerate(branches)
    ]
