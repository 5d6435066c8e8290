"""Proof that reward functions got the row and the texts of each completion: both are made again from the data set, by prompt id.

`run/loop.py` calls it with every scored generation. The rows of all groups are looked up, and the texts of one
drawn group are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt, RolloutGroup


def check_rows(
    groups: Sequence[RolloutGroup], rows: Mapping[str, Prompt], decode: Callable[[Any], str], seed: tuple[int, ...]
) -> None:
    """Compare groups with the rows of their prompt ids, and the texts of one drawn group with its ids.

    Args:
        rows: the prompts of the data set, by id.
        decode: gives the text of ids, without special tokens.
        seed: draws the group.

    Raises:
        ProofError: a group has the prompt or the columns of another row, or a completion has another text than that of its ids.
    """
    for group in groups:
        row, own = rows.get(group.prompt.prompt_id), group.prompt
        same = row is not None and (
            own is row
            or (own.source == row.source and np.array_equal(own.ids, row.ids) and _equal(own.columns, row.columns))
        )
        if not same:
            raise _wrong(f"the group of prompt {own.prompt_id} does not have the prompt and the columns of that row")
    drawn = groups[int(np.random.default_rng(seed).integers(len(groups)))]
    for rollout in drawn.rollouts:
        # What a program, an environment or an agent has noted may have made another text.
        if rollout.notes or rollout.further:
            continue
        due = decode(rollout.token_ids.tolist())
        if rollout.text != due:
            raise _wrong(f"the text of {rollout.key} is {rollout.text[:60]!r}; its ids are {due[:60]!r}")


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are equal. Values that have no truth value, such as arrays, are compared by their text."""
    return one.keys() == other.keys() and all(repr(one[name]) == repr(other[name]) for name in one)


def _wrong(found: str) -> ProofError:
    return ProofError(
        "rows",
        found,
        "rollouts were paired with another row or another completion's text, so that rewards belong to other completions",
        "let nothing replace groups between sampling and scoring; otherwise this is a defect of Lockstep: report it",
    )
