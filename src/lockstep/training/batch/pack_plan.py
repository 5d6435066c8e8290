"""Where a micro-batch is cut into packs: as few as the budget allows, no prompt twice without need, and about equal in size.

Comes from and goes to: `training/batch/pack.py`, which makes tensors of each pack. Filling one pack after the other would leave a
small rest, and the largest pack, and with it a step's memory, would be as large as the budget where two packs of little more than
half of it do. The work grows with the number of paths and not with their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.training.batch.tree import Ints, SortedPaths

# Of the packs that begin at a unit: the size of each, by the unit that it ends before, and the waste of each (or of all).
_Packs = tuple[Ints, Ints | int]


def cut_tree(paths: SortedPaths, units: Sequence[int], prompts: Sequence[int], budget: int) -> list[range]:
    """Runs of units, each a pack whose paths form one tree.

    Of all cuts of the units in this order the one with the fewest packs; of those, the one whose packs repeat the fewest prompt
    positions of the pack before; of those, the one whose largest pack is smallest.

    Args:
        paths: of all units, one unit after the other.
        units: how many paths each unit has; they stay in one pack.
        prompts: how many ids of each unit's first path are its prompt's.
        budget: most nodes of a pack, those that paths share counted once; a unit that is larger gets a pack of its own.
    """
    if paths.size <= budget:
        return [range(len(units))] if units else []
    bounds, lengths = np.concatenate(([0], np.cumsum(units))), paths.lengths
    # How much of each path is shared with one before it in the pack at hand; at first with those of its own unit.
    known = np.zeros(len(lengths), dtype=np.int64)
    repeated = np.zeros(len(units), dtype=np.int64)

    def packs(start: int) -> _Packs:
        first, stop = bounds[start], bounds[start + 1]
        for path in range(first, stop):
            shared = paths.shared_with(path)
            np.maximum(known[path + 1 :], shared[path + 1 :], out=known[path + 1 :])
            if path == first and start:
                repeated[start] = min(shared[path - 1], prompts[start])
        sizes = np.cumsum(lengths[first:] - known[first:])
        return sizes[bounds[start + 1 :] - first - 1], int(repeated[start])

    return _best(len(units), budget, packs)


def cut_rows(lengths: Sequence[Sequence[int]], budget: int) -> list[range]:
    """Runs of units, each a pack with one row per path, padded to its longest.

    Of all cuts of the units in this order the one with the fewest packs; of those, the one with the least padding; of those, the
    one whose largest pack is smallest.

    Args:
        lengths: of the paths of each unit, which stay in one pack.
        budget: most positions of a pack, padding included; a unit that is larger gets a pack of its own.
    """
    rows = np.array([len(unit) for unit in lengths], dtype=np.int64)
    longest = np.array([max(unit) for unit in lengths], dtype=np.int64)
    filled = np.array([sum(unit) for unit in lengths], dtype=np.int64)

    def packs(start: int) -> _Packs:
        sizes = np.cumsum(rows[start:]) * np.maximum.accumulate(longest[start:])
        return sizes, sizes - np.cumsum(filled[start:])

    return _best(len(lengths), budget, packs)


def _best(count: int, budget: int, packs: Callable[[int], _Packs]) -> list[range]:
    """The best cut of `count` units.

    Args:
        packs: sizes and wastes of the packs that begin at a unit; asked for each unit in turn, from the last to the first. Sizes
            do not fall.
    """
    # Of the units from one on: how many packs they take, what they waste, their largest pack, and where their first pack ends.
    number, waste, largest, after = (np.zeros(count + 1, dtype=np.int64) for _ in range(4))
    for start in reversed(range(count)):
        sizes, wastes = packs(start)
        fitting = max(1, int(np.searchsorted(sizes, budget, side="right")))
        ends = slice(start + 1, start + 1 + fitting)
        costs = (
            number[ends] + 1,
            waste[ends] + (wastes if isinstance(wastes, int) else wastes[:fitting]),
            np.maximum(largest[ends], sizes[:fitting]),
        )
        best = np.arange(fitting)
        for cost in costs:
            best = best[cost[best] == cost[best].min()]
        choice = best[0]
        number[start], waste[start], largest[start] = (cost[choice] for cost in costs)
        after[start] = start + 1 + choice
    runs, start = [], 0
    while start < count:
        runs.append(range(start, int(after[start])))
        start = int(after[start])
    return runs
