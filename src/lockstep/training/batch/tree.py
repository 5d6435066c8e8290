"""A tree of token ids, as arrays, and the plan by which a micro-batch is cut into packs.

Sequences with a common prefix share the nodes of that prefix. The paths are sorted once. The common prefixes of neighbours in that
order determine all others. The cost per token is that of copying the token.

The plan has few packs, few repeated prompts, and packs of about the same size. A simple method would fill one pack after the other:
its first packs would be as large as the budget, and its last pack would be small. Two packs of about half the budget need less
memory, because the largest pack determines the memory of a step. The time of planning grows with the number of paths, not with the
number of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """T nodes in depth-first order: a node, its first child with everything below it, its next child, and so on.

    Attributes:
        tokens: (T,) id of each node.
        depths: (T,) number of ancestors of each node.
        ends: (T,) for each node, the index after its last descendant. Node i sees node j if and only if j <= i < ends[j].
        nodes: the nodes of each path, from its first token to its last.
    """

    tokens: Ints
    depths: Ints
    ends: Ints
    nodes: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class SortedPaths:
    """N paths of token ids and their order.

    Attributes:
        paths: the ids of each path, in the order given.
        order: (N,) index of the k-th path in sorted order.
        ranks: (N,) position of each path in sorted order.
        shared: (N,) number of ids in the common prefix of the k-th path and the path before it in sorted order.
    """

    paths: tuple[Ints, ...]
    order: Ints
    ranks: Ints
    shared: Ints

    @classmethod
    def of(cls, paths: Sequence[Any]) -> SortedPaths:
        """Sort paths. Each path is a sequence or an array of ids."""
        arrays = tuple(np.asarray(path, dtype=np.int64) for path in paths)
        # Comparing bytes is fast. With the highest byte first, the bytes have the same order as the ids.
        keys = [array.astype(">u4").tobytes() for array in arrays]
        order = np.array(sorted(range(len(arrays)), key=keys.__getitem__), dtype=np.int64)
        shared, ranks = np.zeros(len(arrays), dtype=np.int64), np.empty(len(arrays), dtype=np.int64)
        ranks[order] = np.arange(len(arrays))
        for k in range(1, len(arrays)):
            shared[k] = _common(arrays[order[k - 1]], arrays[order[k]])
        return cls(arrays, order, ranks, shared)

    @property
    def lengths(self) -> Ints:
        """(N,) number of ids of each path."""
        return np.array([len(path) for path in self.paths], dtype=np.int64)

    @property
    def size(self) -> int:
        """Number of nodes of the tree of all paths."""
        return int(self.lengths.sum() - self.shared.sum())

    def shared_with(self, path: int) -> Ints:
        """(N,) length of the common prefix of one path and each path, in ids."""
        rank, found = int(self.ranks[path]), np.empty(len(self.paths), dtype=np.int64)
        found[rank] = len(self.paths[path])
        # The common prefix of two paths is the shortest common prefix of the neighbours between them.
        found[rank + 1 :] = np.minimum.accumulate(self.shared[rank + 1 :])
        found[:rank] = np.minimum.accumulate(self.shared[rank:0:-1])[::-1]
        return found[self.ranks]

    def tree(self, members: Sequence[int]) -> TokenTree:
        """The tree of some of the paths. `nodes` has the order of `members`."""
        ranks = self.ranks[np.asarray(members, dtype=np.int64)]
        sequence = np.argsort(ranks, kind="stable")
        ranks = ranks[sequence]
        shared = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: ranks[-1] + 1], ranks[:-1] + 1)
        paths = [self.paths[self.order[rank]] for rank in ranks]
        sizes = np.array([len(path) for path in paths], dtype=np.int64) - shared
        ends = np.full(int(sizes.sum()), int(sizes.sum()), dtype=np.int64)
        # Nodes of the current path.
        along = np.empty(max((len(path) for path in paths), default=0), dtype=np.int64)
        nodes: list[Ints] = [along] * len(paths)
        first = last = 0
        for k, path in enumerate(paths):
            same = int(shared[k])
            # The nodes of the previous path after the common prefix get no further descendants.
            ends[along[same:last]] = first
            first, last = first + len(path) - same, len(path)
            along[same:last] = np.arange(first - last + same, first)
            nodes[sequence[k]] = along[:last].copy()
        tokens = [path[same:] for path, same in zip(paths, shared, strict=True)]
        depths = [np.arange(same, len(path)) for path, same in zip(paths, shared, strict=True)]
        return TokenTree(_joined(tokens), _joined(depths), ends, tuple(nodes))


def _common(one: Ints, other: Ints) -> int:
    """Length of the common prefix of two paths, in ids."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    place = int(differs.argmax()) if shorter else 0
    return place if shorter and differs[place] else shorter


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


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
