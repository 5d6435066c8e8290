"""Plans attention over a tree of tokens: by pieces for a CPU, by paths for a GPU.

Nodes are in depth-first order, and node i sees node j if and only if j <= i < ends[j] (`learn/pack.py`). A chain is a
run of nodes in which each node is the parent of the next. Therefore:

- Within a chain, attention is plain causal attention. PyTorch's kernel for CPUs computes all pairs of a chain of up
  to 512 nodes, also those that the causal mask hides. There a chain can be cut into blocks, so that fewer such pairs
  are computed.
- All nodes of a chain see all ancestors of its first node. These columns need no mask either.
- Adjacent chains, such as the completions of one prompt, mostly see the same ancestors. The plan joins these columns.
- Only a block of several short chains needs a mask. Its size is the block's rows × the few columns that some rows do
  not see.

A path goes from a root of the tree down to a leaf. Along a path attention is plain causal attention, so many paths are
one batch: one call of the kernel, without a mask. Padding at the end is hidden by causal attention. A node is a row of
every path that goes through it, and its result is taken from one of them. Most of the other rows are left out: the rows
of a call begin where some path of the call first needs a result. Before that there are columns only.

A plan by paths has few calls, and more rows and columns than the tree has nodes. A plan by pieces has many calls, and
computes each row once. The choice is made by arithmetic, with the figures below. It needs nothing that is on the
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lockstep.learn.pack import Ints

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
    """Blocks that contain every row once, and the columns `above` them, joined where adjacent blocks have the same."""

    blocks: tuple[Block, ...]
    shared: tuple[Shared, ...]


def plan_attention(ends: Ints, rows: int = ROWS, chain_rows: int | None = None) -> AttentionPlan:
    """Plan attention over the (T,) `ends` of a tree.

    Args:
        rows: largest number of rows of a block with several chains.
        chain_rows: a chain of more rows is several blocks, at most sixteen, which see the blocks before them as columns
            that need no mask. None: a chain is one block.
    """
    plan = _joined(_blocks(ends, rows))
    return plan if chain_rows is None else _with_short_chains(plan, chain_rows)


def plan_window(size: int, window: int, rows: int = ROWS) -> AttentionPlan:
    """Plan attention over `size` tokens in blocks of `rows`: each token sees itself and the `window` − 1 before it."""
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
    """Start and stop of each chain, and the ancestors of its first node. A chain ends in a leaf."""
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


# Microseconds of one layer, forward and backward. The start of a kernel, and with 1,536 wide queries, 256 wide keys,
# 3 TB/s and 300 TFLOP/s: a row (17 times 1,536 bf16 numbers are moved), a column (11 times 512 of them), a pair (18 ×
# 1,536 operations).
LAUNCH, ROW, COLUMN, PAIR = 5.0, 0.017, 0.004, 0.0001
# Kernels of one call, and of a block without a mask and with one (counted, `tests/pretend_cuda/launches.py`).
OF_CALL, OF_BLOCK, OF_MASKED = 14, 12, 18
# A kernel with a mask computes a pair in about this many times the time.
_MASKED_PAIR = 3.0
# The columns of one call: at most this many times the pack's positions. A small pack has the room of the usual one,
# whose positions are the second number.
MOST_COLUMNS, USUAL_PACK = 4, 4096
# The most places where paths are parted into calls. It bounds the work of the plan.
_MOST_CUT_PATHS = 64


@dataclass(frozen=True, slots=True)
class PathCall:
    """Paths that are computed in one call of the kernel.

    Attributes:
        columns: (B, C) the nodes of B paths, padded at the end with node 0.
        first: the first column that is a row too. The others have no rows.
        used: (B, C - first) bool: the rows whose result is used.
    """

    columns: Ints
    first: int
    used: np.ndarray

    @property
    def rows(self) -> Ints:
        """(B, C - first) the nodes of the rows."""
        return self.columns[:, self.first :]


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain of a plan by pieces, and the path that ends in it: `nodes`, of which `ancestors` are above the chain."""

    path: tuple[Run, ...]
    ancestors: int
    nodes: int


def plan_paths(ends: Ints, blocks: AttentionPlan) -> tuple[PathCall, ...] | None:
    """Plan attention over the (T,) `ends` of a tree by paths. None: the plan `blocks` of the tree takes less time."""
    chains = sorted(_chains(ends), key=lambda chain: (chain.ancestors, chain.nodes))
    if len(chains) == 1:
        return None
    most = MOST_COLUMNS * max(len(ends), USUAL_PACK)
    groups, microseconds = _cheapest(chains, most)
    if microseconds > microseconds_of(blocks):
        return None
    return tuple(_call(chains[i:j]) for i, j in groups)


def microseconds_of(plan: AttentionPlan | Sequence[PathCall]) -> float:
    """What attention over one layer takes by arithmetic, forward and backward."""
    if not isinstance(plan, AttentionPlan):
        return sum(_cost(len(call.columns), call.columns.shape[1], call.first, 1) for call in plan)
    total = 0.0
    for block in plan.blocks:
        rows, above, own = block.stop - block.start, size_of(block.above), size_of(block.columns)
        pairs = rows * (above + own / 2) if block.chain else _MASKED_PAIR * rows * (above + own)
        total += LAUNCH * (OF_BLOCK if block.chain else OF_MASKED)
        total += ROW * rows + COLUMN * (above + own) + PAIR * pairs
    return total


def _cost(paths: int, columns: int, first: int, calls: int) -> float:
    rows = columns - first
    pairs = rows * first + rows * rows / 2
    return LAUNCH * OF_CALL * calls + paths * (ROW * rows + COLUMN * columns + PAIR * pairs)


def _chains(ends: Ints) -> Iterator[_Chain]:
    for start, stop, above in chains_of(ends):
        ancestors = size_of(above)
        yield _Chain((*above, (start, stop)), ancestors, ancestors + stop - start)


def _cheapest(chains: Sequence[_Chain], most: int) -> tuple[list[tuple[int, int]], float]:
    """Adjacent chains, parted into calls of at most `most` columns so that the time is least; and that time."""
    cuts = np.unique(np.linspace(0, len(chains), min(len(chains), _MOST_CUT_PATHS) + 1).astype(int)).tolist()
    longest = np.array([max(c.nodes for c in chains[i:j]) for i, j in pairwise(cuts)])
    best: list[tuple[float, int]] = [(0.0, 0)] + [(np.inf, 0)] * (len(cuts) - 1)
    for a in range(len(cuts) - 1):
        first = chains[cuts[a]].ancestors
        for b, columns in enumerate(np.maximum.accumulate(longest[a:]).tolist(), a + 1):
            paths = cuts[b] - cuts[a]
            cost = best[a][0] + _cost(paths, columns, first, -(-paths // max(1, most // columns)))
            best[b] = min(best[b], (cost, a))
    groups: list[tuple[int, int]] = []
    at = len(cuts) - 1
    while at:
        start = best[at][1]
        low, high = cuts[start], cuts[at]
        calls = -(-(high - low) // max(1, most // int(longest[start:at].max())))
        bounds = np.linspace(low, high, calls + 1).astype(int).tolist()
        groups = [*pairwise(bounds), *groups]
        at = start
    return groups, best[-1][0]


def _call(chains: Sequence[_Chain]) -> PathCall:
    columns = np.zeros((len(chains), max(chain.nodes for chain in chains)), dtype=np.int64)
    first = min(chain.ancestors for chain in chains)
    used = np.zeros((len(chains), columns.shape[1] - first), dtype=bool)
    for row, marks, chain in zip(columns, used, chains, strict=True):
        row[: chain.nodes] = positions(chain.path)
        marks[chain.ancestors - first : chain.nodes - first] = True
    return PathCall(columns, first, used)
