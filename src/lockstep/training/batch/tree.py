"""A tree of token ids, as arrays. Sequences with a common prefix share the nodes of that prefix.

The lengths of common prefixes decide how sequences are packed. The paths are sorted once. The common prefixes of
neighbours in that order determine all others. The cost per token is that of copying the token.
"""

from __future__ import annotations

from collections.abc import Sequence
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
