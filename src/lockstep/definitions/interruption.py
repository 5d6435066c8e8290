"""The rule that says when a completion's thinking is interrupted, and with which ids, written a second time."""

from __future__ import annotations

import numpy as np


def broken_rule(
    ids: np.ndarray, sampled: np.ndarray, earliest: int, latest: int, inserted: np.ndarray, end: np.ndarray
) -> str | None:
    """How a completion breaks the rule of interruptions; None if it follows it.

    Args:
        ids: (N,) ids of the completion.
        sampled: (N,) bool, whether each id was sampled.
        earliest, latest: smallest and largest number of tokens after which a completion that still thinks is interrupted.
        inserted: ids of the interruption.
        end: consecutive ids that end the thinking.
    """
    places = np.flatnonzero(~sampled)
    if not len(places):
        if len(ids) > latest and not _contains(ids[:latest], end):
            return f"has {len(ids)} tokens, did not end its thinking within {latest} tokens, and was not interrupted"
        return None
    start = int(places[0])
    if not np.array_equal(places, np.arange(start, start + len(inserted))) or not np.array_equal(ids[places], inserted):
        return f"has {len(places)} inserted ids, and they are not the {len(inserted)} ids of the interruption"
    if not earliest <= start <= latest:
        return f"was interrupted after {start} tokens instead of {earliest} to {latest}"
    if _contains(ids[:start], end):
        return f"was interrupted after {start} tokens, although it had ended its thinking"
    return None


def _contains(ids: np.ndarray, part: np.ndarray) -> bool:
    """Whether the ids of `part` come one after the other in `ids`."""
    starts = np.arange(len(ids) - len(part) + 1)
    return bool(len(starts)) and bool((ids[starts[:, None] + np.arange(len(part))] == part).all(axis=1).any())
