"""Several branches of one rollout as one sequence, and back.

A rollout that is a tree has one `TrainingSequence` per branch, because each branch is scored in its own context.
Advantages and weights belong to the rollout. Therefore the branches of each rollout are joined for the methods, and
what the methods have computed is split again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.tokens.arrays import cut, joined, reals, whole_numbers
from lockstep.training.batch.sequence import TrainingSequence

# Values per sampled token that exist before advantages are computed, and those that methods add.
_SCORED = ("behaviour_logps", "old_logps", "entropies", "fresh", "ref_logps", "values")
_ADDED = ("advantages", "returns", "kept")


def joined_branches(name: str, branches: Sequence[TrainingSequence]) -> TrainingSequence:
    """All sampled tokens of a rollout as one sequence, one branch after the other.

    The result has no inserted ids and is in no context: it must not be scored.

    Args:
        name: name of the rollout.
        branches: its branches with sampled tokens: several, or none. Without any, the result has no tokens.
    """
    columns: dict[str, Any] = {
        field: joined([getattr(b, field) for b in branches])
        for field in _SCORED
        if branches and getattr(branches[0], field) is not None
    }
    if not branches:
        columns = {field: reals([]) for field in _SCORED if field != "fresh"}
    ids = joined([b.sampled_ids for b in branches]) if branches else whole_numbers([])
    return TrainingSequence(name, prompt_ids=whole_numbers([]), completion_ids=ids, **columns)


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
