"""Random trees of tokens, and tree attention for packs as small as those of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from lockstep.training.forward import tree_attention


@contextmanager
def small_blocks() -> Iterator[None]:
    """Make attention cut packs of a dozen tokens into blocks, for every mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_ROWS", 6)
        patch.setattr(tree_attention, "_GAP", 2)
        patch.setattr(tree_attention, "_WORTH", 2.0)
        yield


class Layer(torch.nn.Module):
    """The attributes of a layer that an attention function reads, with three query heads per key head."""

    num_key_value_groups = 3


@st.composite
def tree_masks(draw: st.DrawFn) -> torch.Tensor:
    """(T, T) bool masks of trees of 13 to 60 nodes, parents before children."""
    size = draw(st.integers(13, 60))
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        # Most nodes continue a chain, as in completions; some begin a new branch, and some a new root.
        parent = draw(st.sampled_from([node - 1, node - 1, node - 1, draw(st.integers(-1, node - 1))]))
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
