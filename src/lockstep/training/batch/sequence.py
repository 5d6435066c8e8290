"""What is learned from one completion: its ids, and one value of everything else for each sampled token.

Comes from: `training/step/generation.py`. Goes to: `training/batch/pack.py`, which makes tensors of it, and to the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep.tokens.arrays import (
    ArrayFields,
    Flags,
    Ids,
    Reals,
    chosen,
    flags,
    joined,
    places_of,
    reals,
    whole_numbers,
)

_REALS = ("behaviour_logps", "advantages", "old_logps", "entropies", "ref_logps", "values", "returns")
_FLAGS = ("fresh", "kept", "sampled")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence(ArrayFields):
    """One completion to learn from, or only to verify. Its N tokens are those that were sampled.

    Its arrays are read-only; any sequence of the right values is taken.

    Attributes:
        name: the request's name.
        prompt_ids: (P,) int64 ids before the completion.
        completion_ids: (C,) int64 sampled ids, the end token included, and what was put between them.
        behaviour_logps: (N,) float32 engine's log-prob of each sampled id.
        advantages: (N,) float32 of each sampled token; a method that has one for the whole completion repeats it.
        weight: weight of each of its tokens in the step's loss.
        old_logps: (N,) float32 policy's log-probs before the generation's first step; None: the learning forward's own are those.
        entropies: (N,) float32 its entropies then, where a pass before the first step has scored the sequence: its tokens are
            proven.
        fresh: (N,) bool, whether each token was sampled by the weights that learn from it; None: all were.
        ref_logps: (N,) float32 reference model's, where a method uses one.
        kept: (N,) bool, whether each token is learned from, where a method leaves some out; None: all are.
        values, returns: (N,) float32 a critic's value before each token and what it is to become, where a method has a critic.
        unit: sequences of one unit stand side by side and stay in one pack, since their loss is one; None: it is alone.
        sampled: (C,) bool, whether each of `completion_ids` was sampled; None: all were.

    Raises:
        BadValues: something else stands where integers, numbers or booleans belong.
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

    def __post_init__(self) -> None:
        kinds = (("prompt_ids", "completion_ids"), whole_numbers), (_REALS, reals), (_FLAGS, flags)
        for names, kind in kinds:
            for name in names:
                values = getattr(self, name)
                if values is not None:
                    self._set(name, kind(values))

    @property
    def length(self) -> int:
        """N: how many ids were sampled."""
        return len(self.completion_ids) if self.sampled is None else int(np.count_nonzero(self.sampled))

    @property
    def sampled_ids(self) -> Ids:
        """(N,) ids of its tokens."""
        return chosen(self.completion_ids, self.sampled)

    @property
    def path(self) -> Ids:
        """Ids that a model has to see to predict all of its tokens."""
        return joined([self.prompt_ids, self.completion_ids[: self._places[-1]]])

    @property
    def predictors(self) -> Ids:
        """(N,) where in `path` each of its tokens is predicted."""
        return len(self.prompt_ids) - 1 + self._places

    @property
    def _places(self) -> Ids:
        return places_of(self.sampled, len(self.completion_ids))


def flat(sequences: Sequence[TrainingSequence], name: str) -> np.ndarray:
    """(N,) what sequences have under `name` for each of their tokens, one sequence after the other.

    Raises:
        ValueError: a sequence has nothing there, or not one value per token.
    """
    columns = [getattr(s, name) for s in sequences]
    for sequence, values in zip(sequences, columns, strict=True):
        if values is None or len(values) != sequence.length:
            raise ValueError(f"sequence {sequence.name} has no {name} for each of its tokens")
    return np.concatenate(columns) if columns else np.empty(0, np.float32)


def column(sequences: Sequence[TrainingSequence], name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(N,) tensor of `flat`.

    Args:
        dtype: float64 where differences of what is small are taken.

    Raises:
        ValueError: as `flat`.
    """
    return torch.from_numpy(flat(sequences, name)).to(dtype)
