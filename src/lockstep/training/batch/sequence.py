"""What is learned from one completion: its ids, and one value of everything else for each sampled token.

Comes from: `training/step/generation.py`. Goes to: `training/batch/pack.py`, which makes tensors of it, and to the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.engines.protocol import places_of


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One completion to learn from, or only to verify. Its tokens are those that were sampled.

    Attributes:
        name: the request's name.
        prompt_ids: ids before the completion.
        completion_ids: sampled ids, the end token included, and what was put between them.
        behaviour_logps: the engine's log-prob of each sampled id.
        advantages: of each sampled token; a method that has one for the whole completion repeats it.
        weight: weight of each of its tokens in the step's loss.
        old_logps: the policy's log-probs before the generation's first step; None: the learning forward's own are those.
        entropies: its entropies then, where a pass before the first step has scored the sequence: its tokens are proven.
        fresh: whether each token was sampled by the weights that learn from it; None: all were.
        ref_logps: the reference model's, where a method uses one.
        kept: whether each token is learned from, where a method leaves some out; None: all are.
        values, returns: a critic's value before each token and what it is to become, where a method has a critic.
        unit: sequences of one unit stand side by side and stay in one pack, since their loss is one; None: it is alone.
        sampled: whether each of `completion_ids` was sampled; None: all were.
    """

    name: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    behaviour_logps: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    weight: float = 0.0
    old_logps: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    fresh: tuple[bool, ...] | None = None
    ref_logps: tuple[float, ...] | None = None
    kept: tuple[bool, ...] | None = None
    values: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None
    unit: str | None = None
    sampled: tuple[bool, ...] | None = None

    @property
    def length(self) -> int:
        """Its tokens: how many ids were sampled."""
        return len(self.completion_ids) if self.sampled is None else sum(self.sampled)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Ids of its tokens."""
        return tuple(self.completion_ids[i] for i in self._places)

    @property
    def path(self) -> tuple[int, ...]:
        """Ids that a model has to see to predict all of its tokens."""
        return (*self.prompt_ids, *self.completion_ids[: self._places[-1]])

    @property
    def predictors(self) -> list[int]:
        """Where in `path` each of its tokens is predicted."""
        return [len(self.prompt_ids) - 1 + i for i in self._places]

    @property
    def _places(self) -> Sequence[int]:
        return places_of(self.sampled, len(self.completion_ids))


def column(sequences: Sequence[TrainingSequence], name: str) -> torch.Tensor:
    """(N,) float32: what sequences have under `name` for each of their tokens, one sequence after the other.

    Raises:
        ValueError: a sequence has nothing there, or not one value a token.
    """
    columns = [getattr(s, name) for s in sequences]
    for sequence, values in zip(sequences, columns, strict=True):
        if values is None or len(values) != sequence.length:
            raise ValueError(f"sequence {sequence.name} has no {name} for each of its tokens")
    return torch.tensor([value for values in columns for value in values], dtype=torch.float32)


def token_names(sequences: Sequence[TrainingSequence]) -> list[str]:
    """N names: the request that each token belongs to."""
    return [s.name for s in sequences for _ in range(s.length)]
