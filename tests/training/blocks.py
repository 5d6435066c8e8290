"""Attention by trees for packs as small as the tests'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.training import tree_attention


@contextmanager
def small_blocks() -> Iterator[None]:
    """Packs of a dozen tokens are cut, however little their masks hide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_ROWS", 6)
        patch.setattr(tree_attention, "_GAP", 2)
        patch.setattr(tree_attention, "_WORTH", 2.0)
        yield
