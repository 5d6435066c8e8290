"""From sequences to tensors: a tree of token ids, and the packs into which it is cut.

All sequences of a pack form one tree of tokens: the pack has one row with one position per node, and sequences with a
common prefix share its positions. A token attends to its ancestors, and its position id is its depth. Therefore each
branch attends to the same tokens as if it went through the model alone. There are no pad tokens, and the last token of
a completion has no position, because it predicts no token of the loss. Models that cannot attend within a tree get
plain rows instead. One integer per node (`ends`) describes which tokens each token sees.

A completion can contain inserted tokens that were not sampled (`rollouts/conversation.py`). Other tokens attend to them
as to the tokens of a prompt, and they are not scored: all scored tokens of a pack, and all columns, are of sampled
tokens.

The paths are sorted once. The common prefixes of neighbours in that order determine all others. The cut has few packs,
few repeated prompts, and packs of about the same size, because the largest pack determines the memory of a step. The
time of planning grows with the number of paths, not with the number of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.devices import sent, usual_token_budgets
from lockstep.images.packs import NO_PACK_PICTURES, PackPictures, PictureNumbers
from lockstep.learn.sequence import TrainingSequence, column, rollouts_of
from lockstep.tokens.arrays import KeptIds, joined_kept_ids

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """T nodes in depth-first order: a node, its first child with everything below it, its next child, and so on.

    Attributes:
        tokens: (T,) id of each node.
        depths: (T,) number of ancestors of each node.
        ends: (T,) the index after each node's last descendant. Node i sees node j if and only if j <= i < ends[j].
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
        shared: (N,) length of the common prefix of the k-th path in sorted order and the path before it.
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


# All possible packs that begin at one unit, ordered by where they end: their sizes, their wastes (an int if all are
# equal), and the number of them that may be larger than the budget.
_Packs = tuple[Ints, Ints | int, int]
# A pack may be larger than the budget where it would otherwise repeat a prompt of at least this share of the budget.
_LONG_PROMPT = 0.1


def cut_tree(
    paths: SortedPaths, units: Sequence[int], prompts: Sequence[int], budget: int, for_group: int = 0
) -> list[range]:
    """Cut units into packs. The paths of each pack form one tree. Returns the units of each pack.

    The cut keeps the order of the units. It has the fewest packs; among such cuts, its packs repeat the fewest prompt
    positions of the previous pack; among these, its largest pack is smallest.

    Args:
        paths: the paths of all units, one unit after the other.
        units: number of paths of each unit. The paths of a unit stay in one pack.
        prompts: number of prompt ids in each unit's first path.
        budget: largest number of nodes of a pack. A unit that is larger gets a separate pack.
        for_group: largest number of nodes of a pack whose units have the same prompt, if the prompt takes a tenth of
            the budget or more. 0: the budget.
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

    The cut keeps the order of the units. It has the fewest packs; among such cuts, the least padding; among these, its
    largest pack is smallest.

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
        packs: returns the packs that begin at a unit. It is called once per unit, from the last unit to the first. The
            sizes never decrease.
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


@dataclass(frozen=True, slots=True)
class Pack:
    """The input of one forward, with N scored tokens. The tokens are in the order of the sequences.

    Attributes:
        input_ids: (1, T) ids of a tree's nodes in depth-first order; or (B, L) ids of plain rows, padded at the end
            with zeros.
        position_ids: depth of each node, in the same shape. With pictures there may be one more dimension in front: the
            axes of the model's positions.
        predictors: (N,) index of the node whose hidden state predicts each scored token. The index runs over all rows.
        targets: (N,) ids of the scored tokens.
        ends: (T,) as in `TokenTree`, on the CPU, where attention is planned. None: plain rows with causal attention.
        pictures: the pictures of its placeholders.
        predictors_on_host: `predictors` as the pack was made, if they have been moved to another device.
    """

    sequences: tuple[TrainingSequence, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor | None = None
    pictures: PackPictures = NO_PACK_PICTURES
    predictors_on_host: torch.Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """(R,) number of scored tokens of each rollout, over all of its branches."""
        return [sum(s.length for s in own) for own in rollouts_of(self.sequences)]

    @property
    def host_predictors(self) -> torch.Tensor:
        """(N,) `predictors` on the CPU."""
        return self.predictors.cpu() if self.predictors_on_host is None else self.predictors_on_host

    @property
    def copies(self) -> torch.Tensor:
        """(T,) or (B·L,) int64 number of sequences that go through each position; 0 for padding."""
        size, width = self.input_ids.numel(), self.input_ids.shape[-1]
        ends = self.ends if self.ends is not None else (torch.arange(size) // width + 1) * width
        last = self.host_predictors[torch.tensor([s.length for s in self.sequences]).cumsum(0) - 1]
        ended = torch.zeros(size + 1, dtype=torch.long)
        ended[1:] = torch.bincount(last, minlength=size).cumsum(0)
        return sent(ended[ends] - ended[:-1], self.input_ids.device)

    def column(self, name: str) -> torch.Tensor:
        """(N,) float32 values of the field `name` of the sequences, one value per token, as in `sequence.flat`."""
        return sent(column(self.sequences, name), self.targets.device)

    def kept_ids(self) -> KeptIds:
        """One set of ids for each of the N tokens."""
        for sequence in self.sequences:
            if sequence.kept_ids is None or len(sequence.kept_ids) != sequence.length:
                raise ValueError(f"sequence {sequence.name} has no kept ids for each of its tokens")
        return joined_kept_ids([s.kept_ids for s in self.sequences if s.kept_ids is not None])

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        if device == self.input_ids.device:
            return self
        names = ("input_ids", "position_ids", "predictors", "targets")
        moved: dict[str, Any] = {name: sent(getattr(self, name), device) for name in names}
        return replace(self, **moved, predictors_on_host=self.host_predictors)


def pack_sequences(sequences: Sequence[TrainingSequence], token_budget: int | None) -> Iterator[Pack]:
    """Yield packs of at most `token_budget` nodes, in the order given. A unit that is larger gets a separate pack.

    Args:
        sequences: sequences with the same prompt must be adjacent; otherwise they share its positions only within a
            pack.
        token_budget: largest number of positions per forward. None: the usual numbers of this machine
            (`usual_token_budgets`).

    Raises:
        ValueError: a sequence has no prompt or no completion, or its mask has another length than its completion.
    """
    units = list(units_of(sequences))
    held = [s for unit in units for s in unit]
    numbers = PictureNumbers([s.pictures for s in held])
    paths = SortedPaths.of([numbers.path(s.path, s.pictures) for s in held])
    counts = [len(unit) for unit in units]
    bounds = [0, *np.cumsum(counts).tolist()]
    budget, for_group = usual_token_budgets() if token_budget is None else (token_budget, token_budget)
    for run in cut_tree(paths, counts, [len(unit[0].prompt_ids) for unit in units], budget, for_group):
        members = range(bounds[run.start], bounds[run.stop])
        tree = paths.tree(members)
        own = [held[i] for i in members]
        ids, pictures = numbers.split(tree.tokens, [s.pictures for s in own], tree.nodes)
        yield Pack(
            sequences=tuple(own),
            input_ids=torch.from_numpy(ids)[None],
            position_ids=pictures.position_ids(torch.from_numpy(tree.depths)[None]),
            predictors=_tensor(
                [nodes[_ints(s.predictors)] for s, nodes in zip(own, tree.nodes, strict=True)]
            ),
            targets=_tensor([_ints(s.sampled_ids) for s in own]),
            ends=torch.from_numpy(tree.ends),
            pictures=pictures,
        )


def pack_rows(sequences: Sequence[TrainingSequence], token_budget: int | None) -> Iterator[Pack]:
    """Yield packs of plain rows, padded at the end, for models that cannot attend within a tree. Short rows come first.

    Args:
        token_budget: largest number of positions of a pack, padding included; None: the usual number of this machine.

    Raises:
        ValueError: as in `pack_sequences`.
    """
    units = sorted(units_of(sequences), key=lambda unit: max(len(s.path) for s in unit))
    budget = usual_token_budgets()[0] if token_budget is None else token_budget
    for run in cut_rows([[len(s.path) for s in unit] for unit in units], budget):
        yield _rows([s for i in run for s in units[i]])


def _rows(held: list[TrainingSequence]) -> Pack:
    shown = [s.pictures for s in held]
    numbers = PictureNumbers(shown)
    paths = [_ints(numbers.path(s.path, s.pictures)) for s in held]
    ids = np.zeros((len(paths), max(len(path) for path in paths)), dtype=np.int64)
    for row, path in zip(ids, paths, strict=True):
        row[: len(path)] = path
    nodes = [row * ids.shape[1] + np.arange(len(path)) for row, path in enumerate(paths)]
    ids, pictures = numbers.split(ids, shown, nodes)
    return Pack(
        sequences=tuple(held),
        input_ids=torch.from_numpy(ids),
        position_ids=pictures.position_ids(torch.arange(ids.shape[1]).expand(len(held), -1)),
        predictors=_tensor([row * ids.shape[1] + _ints(s.predictors) for row, s in enumerate(held)]),
        targets=_tensor([_ints(s.sampled_ids) for s in held]),
        pictures=pictures,
    )


def units_of(sequences: Sequence[TrainingSequence]) -> Iterator[list[TrainingSequence]]:
    """Yield the sequences of each unit as one list."""
    unit: list[TrainingSequence] = []
    for sequence in sequences:
        if not len(sequence.prompt_ids) or not sequence.length:
            raise ValueError(f"sequence {sequence.name} has no prompt or no completion")
        if sequence.sampled is not None and len(sequence.sampled) != len(sequence.completion_ids):
            raise ValueError(
                f"sequence {sequence.name} does not say of each of its ids whether it was sampled"
            )
        if unit and (sequence.unit is None or sequence.unit != unit[-1].unit):
            yield unit
            unit = []
        unit.append(sequence)
    if unit:
        yield unit


def _ints(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _tensor(parts: list[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))
