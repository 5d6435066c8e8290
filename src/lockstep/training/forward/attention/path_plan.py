"""Plans attention over a tree of tokens by its paths, so that a GPU has few kernels to start.

The input is `ends` of `training/batch/pack.py`. A path goes from a root of the tree down to a leaf. Along a path
attention is plain causal attention, so many paths are one batch: one call of the kernel, without a mask. Paths are
padded at the end, where causal attention hides the padding. A node is a row of every path that goes through it, and
its result is taken from one of them. Most of the other rows are left out: the rows of a call begin where some path of
the call first needs a result. Before that there are columns only.

Such a plan has few calls, and more rows and columns than the tree has nodes. A plan of `attention_plan.py` has many calls, and
computes each row once. The choice is made by arithmetic, with the figures below. It needs nothing that is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lockstep.training.batch.tree import Ints
from lockstep.training.forward.attention.attention_plan import AttentionPlan, Run, chains_of, positions, size_of

# Microseconds of one layer, forward and backward. The start of a kernel, and with 1,536 wide queries, 256 wide keys, 3 TB/s and
# 300 TFLOP/s: a row (17 times 1,536 bf16 numbers are moved), a column (11 times 512 of them), a pair (18 × 1,536 operations).
LAUNCH, ROW, COLUMN, PAIR = 5.0, 0.017, 0.004, 0.0001
# Kernels of one call, and of a block without a mask and with one (counted, `tests/pretend_cuda/launches.py`).
OF_CALL, OF_BLOCK, OF_MASKED = 14, 12, 18
# A kernel with a mask computes a pair in about this many times the time.
_MASKED_PAIR = 3.0
# The columns of one call: at most this many times the pack's positions. A small pack has the room of the usual one, whose positions
# are the second number.
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
    """A chain of `attention_plan.py`, and the path that ends in it: `nodes` in all, the first `ancestors` above the chain."""

    path: tuple[Run, ...]
    ancestors: int
    nodes: int


def plan_paths(ends: Ints, blocks: AttentionPlan) -> tuple[PathCall, ...] | None:
    """Plan attention over the (T,) `ends` of a tree by paths. None: `blocks`, a plan of the same tree, takes less time.

    The memory of each call grows with the number of nodes only.
    """
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
        total += LAUNCH * (OF_BLOCK if block.chain else OF_MASKED) + ROW * rows + COLUMN * (above + own) + PAIR * pairs
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
