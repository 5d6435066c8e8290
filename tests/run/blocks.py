"""Random trees of tokens, the dense mask that they stand for, and attention by trees for packs of the tests' size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from lockstep.learn.attention import blocks as block_attention


@contextmanager
def small_blocks() -> Iterator[None]:
    """Packs of a dozen tokens are cut into blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "ROWS", 6)
        yield


class Layer(torch.nn.Module):
    """The attributes of a layer that an attention function reads, with three query heads per key head."""

    num_key_value_groups = 3


def dense(ends: torch.Tensor) -> torch.Tensor:
    """(1, 1, T, T) bool: the mask that `ends` stand for."""
    nodes = torch.arange(len(ends))
    return ((nodes <= nodes[:, None]) & (nodes[:, None] < ends))[None, None]


@st.composite
def tree_ends(draw: st.DrawFn, smallest: int = 1) -> torch.Tensor:
    """(T,) `ends` of trees of up to 60 nodes in depth-first order."""
    size = draw(st.integers(smallest, 60))
    ends, path = list(range(1, size + 1)), [0]
    for node in range(1, size):
        # Mostly chains, as completions are; sometimes a new branch, sometimes a new root.
        kept = draw(st.sampled_from([len(path)] * 3 + [draw(st.integers(0, len(path)))]))
        path = [*path[:kept], node]
        for ancestor in path:
            ends[ancestor] = node + 1
    return torch.tensor(ends)
