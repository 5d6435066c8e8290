"""Plans how a micro-batch is cut into packs: few packs, few repeated prompts, and packs of about the same size.

A simple method would fill one pack after the other. Its first packs would be as large as the budget, and its last pack
would be small. Two packs of about half the budget need less memory, because the largest pack determines the memory of
a step. The time of planning grows with the number of paths. It does not grow with the number of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.training.batch.tree import Ints, SortedPaths

# All possible packs that begin at one unit, ordered by where they end: their sizes, their wastes (an int if all are equal), and the
# number of them that may be larger than the budget.
_Packs = tuple[Ints, Ints | int, int]
# A pack may be larger than the budget where it would otherwise repeat a prompt of at least this share of the budget.
_LONG_PROMPT = 0.1


def cut_tree(
    paths: SortedPaths, units: Sequence[int], prompts: Sequence[int], budget: int, for_group: int = 0
) -> list[range]:
    """Cut units into packs. The paths of each pack form one tree. Returns the units of each pack.

    The cut keeps the order of the units. Among all cuts it is one with the fewest packs. If there are several, it is one whose
    packs repeat the fewest prompt positions of the previous pack. If there are still several, it is the one whose largest pack
    is smallest.

    Args:
        paths: the paths of all units, one unit after the other.
        units: number of paths of each unit. The paths of a unit stay in one pack.
        prompts: number of prompt ids in each unit's first path.
        budget: largest number of nodes of a pack. Shared nodes count once. A unit that is larger gets a separate pack.
        for_group: largest number of nodes of a pack whose units have the same prompt, if the prompt takes a tenth of the budget or
            more. 0: the budget.
    """
    if paths.size <= budget:
        return [range(len(units))] if units else []
    bounds, lengths = np.concatenate(([0], np.cumsum(units))), paths.lengths
    # Ids that each path shares with an earlier path of the pack. At first only paths of the same unit are counted.
    known = np.zeros(len(lengths), dtype=np.int64)
    repeated = np.zeros(len(units), dtype=np.int64)
    # Number of units from each unit on that have the same prompt.
    group = [0] * len(units)

    def packs(start: int) -> _Packs:
        first, stop = bounds[start], bounds[start + 1]
        for path in range(first, stop):
            shared = paths.shared_with(path)
            np.maximum(known[path + 1 :], shared[path + 1 :], out=known[path + 1 :])
            if path == first and start:
                repeated[start] = min(shared[path - 1], prompts[start])
        sizes = np.cumsum(lengths[first:] - known[first:])[bounds[start + 1 :] - first - 1]
        following = start + 1
        same = following < len(units) and prompts[following] == prompts[start] == repeated[following]
        group[start] = group[following] + 1 if same else 1
        room = for_group if prompts[start] >= _LONG_PROMPT * budget else 0
        return sizes, int(repeated[start]), min(group[start], int(np.searchsorted(sizes, room, side="right")))

    return _best(len(units), budget, packs)


def cut_rows(lengths: Sequence[Sequence[int]], budget: int) -> list[range]:
    """Cut units into packs with one row per path, padded to the longest row. Returns the units of each pack.

    The cut keeps the order of the units. Among all cuts it is one with the fewest packs. If there are several, it is one with
    the least padding. If there are still several, it is the one whose largest pack is smallest.

    Args:
        lengths: lengths of the paths of each unit. The paths of a unit stay in one pack.
        budget: largest number of positions of a pack, padding included. A unit that is larger gets a separate pack.
    """
    rows = np.array([len(unit) for unit in lengths], dtype=np.int64)
    longest = np.array([max(unit) for unit in lengths], dtype=np.int64)
    filled = np.array([sum(unit) for unit in lengths], dtype=np.int64)

    def packs(start: int) -> _Packs:
        sizes = np.cumsum(rows[start:]) * np.maximum.accumulate(longest[start:])
        return sizes, sizes - np.cumsum(filled[start:]), 0

    return _best(len(lengths), budget, packs)


def _best(count: int, budget: int, packs: Callable[[int], _Packs]) -> list[range]:
    """The best cut of `count` units.

    Args:
        packs: returns the packs that begin at a unit. It is called once per unit, from the last unit to the first. The sizes
            never decrease.
    """
    # For the units from each index to the last: number of packs, waste, largest pack, end of the first pack.
    number, waste, largest, after = (np.zeros(count + 1, dtype=np.int64) for _ in range(4))
    for start in reversed(range(count)):
        sizes, wastes, larger = packs(start)
        fitting = max(1, int(np.searchsorted(sizes, budget, side="right")), larger)
        ends = slice(start + 1, start + 1 + fitting)
        costs = (
            number[ends] + 1,
            waste[ends] + (wastes if isinstance(wastes, int) else wastes[:fitting]),
            np.maximum(largest[ends], sizes[:fitting]),
        )
        # The first key counts least, and equal packs keep their order.
        choice = np.lexsort(costs[::-1])[0] if fitting > 1 else 0
        number[start], waste[start], largest[start] = (cost[choice] for cost in costs)
        after[start] = start + 1 + choice
    runs, start = [], 0
    while start < count:
        runs.append(range(start, int(after[start])))
        start = int(after[start])
    return runs
