"""Plans how attention over a tree of tokens is cut into pieces. Most pieces need no mask; the others are small blocks.

The input is `ends` of `training/batch/pack.py`. Nodes are in depth-first order, and node i sees node j if and only if
j <= i < ends[j]. A chain is a run of nodes in which each node is the parent of the next. Therefore:

- Within a chain, attention is plain causal attention. PyTorch's kernel for CPUs computes all pairs of a chain of up to 512 nodes,
  also those that the causal mask hides. There a chain can be cut into blocks, so that fewer such pairs are computed.
- All nodes of a chain see all ancestors of its first node. These columns need no mask either.
- Adjacent chains, such as the completions of one prompt, mostly see the same ancestors. The plan joins these columns.
- Only a block of several short chains needs a mask. Its size is the block's rows × the few columns that some rows do not see.

The number of pieces grows with the number of chains. The total size of all masks grows with the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.training.batch.tree import Ints

# Rows of a block with a mask. Fewer rows compute fewer masked pairs; more rows use the kernel better.
ROWS = 128
# Rows of a block of one chain where long chains are cut, and the largest number of blocks of one chain.
CHAIN_ROWS, _MOST_CUTS = 128, 16

# First column, and the column after the last one.
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are computed together.

    Attributes:
        start, stop: the first row, and the row after the last one.
        above: columns before the block that all of its rows see.
        partly: columns before the block that only some of its rows see. Empty if the rows are one chain.
        chain: whether the rows are one chain: among them, attention is plain causal attention.
    """

    start: int
    stop: int
    above: tuple[Run, ...]
    partly: tuple[Run, ...]
    chain: bool

    @property
    def columns(self) -> tuple[Run, ...]:
        """The columns that need the block's mask, or its causal one: `partly`, and those of the block itself."""
        return (*self.partly, (self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of one block or of several adjacent blocks. All of them see the same columns before these blocks.

    A row may be in two of them: one for the ancestors of its chain, and one for the blocks of its chain before its own.
    """

    start: int
    stop: int
    columns: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Blocks that contain every row once, and the columns `above` them. Adjacent blocks with the same columns are joined."""

    blocks: tuple[Block, ...]
    shared: tuple[Shared, ...]


def plan_attention(ends: Ints, rows: int = ROWS, chain_rows: int | None = None) -> AttentionPlan:
    """Plan attention over the (T,) `ends` of a tree.

    Args:
        rows: largest number of rows of a block with several chains.
        chain_rows: a chain of more rows is several blocks, at most sixteen. Each of them sees the blocks before it as columns that
            need no mask. None: a chain is one block.
    """
    plan = _joined(_blocks(ends, rows))
    return plan if chain_rows is None else _with_short_chains(plan, chain_rows)


def plan_window(size: int, window: int, rows: int = ROWS) -> AttentionPlan:
    """Plan attention over a text of `size` tokens, each of which sees itself and the `window` − 1 before it.

    Args:
        rows: number of rows of a block.
    """
    blocks = []
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        # The last row sees the fewest columns before the block.
        first, common = max(0, start - window + 1), max(0, min(start, stop - window))
        above = ((common, start),) if common < start else ()
        partly = ((first, common),) if first < common else ()
        blocks.append(Block(start, stop, above, partly, chain=not partly and stop - start <= window))
    return _joined(blocks)


def window_ends(size: int, window: int) -> Ints:
    """(T,) the `ends` of a window: they have the same meaning as a pack's `ends`."""
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


def _with_short_chains(plan: AttentionPlan, rows: int) -> AttentionPlan:
    blocks: list[Block] = []
    shared = list(plan.shared)
    for block in plan.blocks:
        size = block.stop - block.start
        # In a long chain, more blocks than these would leave out few pairs, and cost more than that.
        parts = min(-(-size // rows), _MOST_CUTS) if block.chain else 1
        step = -(-size // parts)
        for start in range(block.start, block.stop, step):
            stop = min(start + step, block.stop)
            before = ((block.start, start),) if start > block.start else ()
            blocks.append(Block(start, stop, (*block.above, *before), block.partly, block.chain))
            shared += [Shared(start, stop, before)] if before else []
    return AttentionPlan(tuple(blocks), tuple(shared))


def visible(ends: Ints, rows: Run, columns: Ints) -> np.ndarray:
    """(rows, columns) bool: whether each row sees each column."""
    row = np.arange(*rows)[:, None]
    seen: np.ndarray = (columns <= row) & (row < ends[columns])
    return seen


def size_of(runs: Sequence[Run]) -> int:
    """The number of columns of some runs."""
    return sum(b - a for a, b in runs)


def positions(runs: tuple[Run, ...]) -> Ints:
    """All columns of some runs."""
    return np.concatenate([np.arange(*run) for run in runs])


def _blocks(ends: Ints, rows: int) -> Iterator[Block]:
    chains = list(chains_of(ends))
    first = 0
    while first < len(chains):
        start, stop, ancestors = chains[first]
        above, last = ancestors, first + 1
        partly: tuple[Run, ...] = ()
        while stop - start < rows and last < len(chains) and chains[last][1] - start <= rows:
            still, lost = _split(ends, ancestors, chains[last][1])
            if size_of(lost) > rows:
                break
            above, partly, stop, last = still, lost, chains[last][1], last + 1
        yield Block(start, stop, above, partly, chain=last == first + 1)
        first = last


def chains_of(ends: Ints) -> Iterator[tuple[int, int, tuple[Run, ...]]]:
    """Start and stop of each chain, and the ancestors of its first node. A chain is as long as possible: it ends in a leaf."""
    size = len(ends)
    # A node after a leaf begins a chain: its parent is not the node before it.
    starts = [0, *(np.flatnonzero(ends[:-1] == np.arange(1, size)) + 1).tolist()] if size else []
    path: tuple[Run, ...] = ()
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        path, _ = _split(ends, path, start + 1)
        yield start, stop, path
        path = (*path, (start, stop))


def _split(ends: Ints, path: tuple[Run, ...], stop: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Split a path from a root downwards: the nodes that all rows before `stop` see, and the rest."""
    kept = len(path)
    while kept:
        a, b = path[kept - 1]
        # Along a path, `ends` never increases.
        edge = b - int(np.searchsorted(ends[a:b][::-1], stop))
        if edge > a:
            rest = ((edge, b),) if edge < b else ()
            return (*path[: kept - 1], (a, edge)), (*rest, *path[kept:])
        kept -= 1
    return (), path
