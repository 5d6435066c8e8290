"""How attention over a tree of tokens is cut into pieces: what a kernel computes without a mask, and small blocks with one.

Comes from: `ends` of `training/batch/pack.py`. Goes to: `training/forward/block_attention.py`. Nodes are in depth-first order, and
node i sees node j if and only if j <= i < ends[j]. A chain is a run of nodes of which each is the parent of the next. From that:

- Within a chain, attention is plain causal attention.
- All nodes of a chain see all ancestors of its first node, so that no mask is needed for those columns either.
- Chains side by side, such as the completions of one prompt, mostly see the same ancestors and take them together.
- Only several short chains in one block need a mask, of the block's rows × the few columns that some of its rows do not see.

The number of pieces follows the number of chains, the sum of all masks the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.training.batch.tree import Ints

# Rows of a block with a mask: fewer compute fewer pairs in vain, more fill the kernel.
ROWS = 128

# Columns from the first on, up to and without the second.
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are computed together.

    Attributes:
        start, stop: the rows.
        above: columns before them that all of them see.
        partly: columns before them that only some of them see; none where the rows are one chain.
        chain: the rows see each other as in plain causal attention.
    """

    start: int
    stop: int
    above: tuple[Run, ...]
    partly: tuple[Run, ...]
    chain: bool


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows, of one block or of several in a row, that all see the same columns before them."""

    start: int
    stop: int
    columns: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Blocks that hold every row once, and the columns above them, joined where blocks side by side have the same."""

    blocks: tuple[Block, ...]
    shared: tuple[Shared, ...]


def plan_attention(ends: Ints, rows: int = ROWS) -> AttentionPlan:
    """Plan attention over the (T,) `ends` of a tree.

    Args:
        rows: most rows of a block that holds several chains.
    """
    return _joined(_blocks(ends, rows))


def plan_window(size: int, window: int, rows: int = ROWS) -> AttentionPlan:
    """Plan attention over a text of `size` tokens, each of which sees itself and the `window` − 1 before it.

    Args:
        rows: rows of a block.
    """
    blocks = []
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        # The last row sees least of what stands before the block.
        first, common = max(0, start - window + 1), max(0, min(start, stop - window))
        above = ((common, start),) if common < start else ()
        partly = ((first, common),) if first < common else ()
        blocks.append(Block(start, stop, above, partly, chain=not partly and stop - start <= window))
    return _joined(blocks)


def window_ends(size: int, window: int) -> Ints:
    """(T,) integers that say of a window what a pack's `ends` say of a tree."""
    return np.minimum(np.arange(size) + window, size)


def _joined(blocks: Iterable[Block]) -> AttentionPlan:
    blocks = tuple(blocks)
    shared: list[Shared] = []
    for block in blocks:
        if not block.above:
            continue
        last = shared[-1] if shared else None
        if last is not None and last.stop == block.start and last.columns == block.above:
            shared[-1] = Shared(last.start, block.stop, block.above)
        else:
            shared.append(Shared(block.start, block.stop, block.above))
    return AttentionPlan(blocks, tuple(shared))


def visible(ends: Ints, rows: Run, columns: Ints) -> np.ndarray:
    """(rows, columns) bool: which columns each row sees."""
    row = np.arange(*rows)[:, None]
    seen: np.ndarray = (columns <= row) & (row < ends[columns])
    return seen


def positions(runs: tuple[Run, ...]) -> Ints:
    """Every column of some runs."""
    return np.concatenate([np.arange(*run) for run in runs])


def _blocks(ends: Ints, rows: int) -> Iterator[Block]:
    chains = list(_chains(ends))
    first = 0
    while first < len(chains):
        start, stop, ancestors = chains[first]
        above, last = ancestors, first + 1
        partly: tuple[Run, ...] = ()
        while stop - start < rows and last < len(chains) and chains[last][1] - start <= rows:
            still, lost = _split(ends, ancestors, chains[last][1])
            if sum(b - a for a, b in lost) > rows:
                break
            above, partly, stop, last = still, lost, chains[last][1], last + 1
        yield Block(start, stop, above, partly, chain=last == first + 1)
        first = last


def _chains(ends: Ints) -> Iterator[tuple[int, int, tuple[Run, ...]]]:
    """Start and stop of each chain, longest first steps down, and the ancestors of its first node."""
    size = len(ends)
    # A node after a leaf begins a chain: its parent is not the node before it.
    starts = [0, *(np.flatnonzero(ends[:-1] == np.arange(1, size)) + 1).tolist()] if size else []
    path: tuple[Run, ...] = ()
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        path, _ = _split(ends, path, start + 1)
        yield start, stop, path
        path = (*path, (start, stop))


def _split(ends: Ints, path: tuple[Run, ...], stop: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Nodes of a path from a root down that all rows before `stop` see, and the rest of the path."""
    kept = len(path)
    while kept:
        a, b = path[kept - 1]
        # Along a path `ends` never rises.
        edge = b - int(np.searchsorted(ends[a:b][::-1], stop))
        if edge > a:
            rest = ((edge, b),) if edge < b else ()
            return (*path[: kept - 1], (a, edge)), (*rest, *path[kept:])
        kept -= 1
    return (), path
