"""A tree of token ids: sequences that begin alike share nodes.

Comes from and goes to: `training/batch/pack.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TokenTree:
    """Token tree under construction; node 0 is the first token, parents come before children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def insert(self, path: Sequence[int]) -> list[int]:
        """Nodes along `path`, made where they do not exist yet."""
        node, nodes = -1, []
        for depth, token in enumerate(path):
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self._children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
            nodes.append(child)
            node = child
        return nodes

    def part(self, paths: Sequence[Sequence[int]]) -> tuple[TokenTree, list[list[int]]]:
        """A tree of some of the paths alone, and their nodes in it."""
        tree, index = TokenTree(), {-1: -1}
        for path in paths:
            for node in path:
                if node not in index:
                    index[node] = len(tree.tokens)
                    tree.tokens.append(self.tokens[node])
                    tree.parents.append(index[self.parents[node]])
                    tree.depths.append(self.depths[node])
        return tree, [[index[node] for node in path] for path in paths]

    def mask(self) -> torch.Tensor:
        """(T, T) bool: each node sees its ancestors and itself."""
        size = len(self.tokens)
        mask = torch.eye(size, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask
