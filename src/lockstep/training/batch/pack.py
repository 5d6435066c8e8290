"""Makes tensors from token ids. Sequences with a common prefix share the positions of that prefix.

The sequences come from rollout groups. All sequences of a pack form one tree of tokens. The pack has one row with one
position per node. A token attends to its ancestors, and its position id is its depth. Therefore each branch attends to
the same tokens as if it went through the model alone. A tree has no pad tokens. A prompt goes through the model once,
for any number of completions. Examples that all prompts repeat go through it once, and so do equal completions.
Branches of one rollout share the tokens up to the place where they part, even if one branch has them in its prompt and
another one in its completion. The last token of a completion has no position, because it predicts no token of the
loss. Models that cannot attend within a tree get plain rows instead.

One integer per node (`ends`) describes which tokens each token sees. A pack does not depend on how attention is computed.

A completion can contain inserted tokens that were not sampled (`rollouts/conversation.py`). Other tokens attend to them as to
the tokens of a prompt, and they are not scored. Only this module handles inserted tokens: all scored tokens of a pack, and all
columns, are of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lockstep.to_device import sent
from lockstep.tokens.kept_ids import KeptIds, joined_kept_ids
from lockstep.training.batch.pictures import PackPictures, PictureNumbers, position_ids
from lockstep.training.batch.sequence import TrainingSequence, column, rollouts_of
from lockstep.training.batch.tree import Ints, SortedPaths, cut_rows, cut_tree
from lockstep.training.config.precision import usual_token_budgets


@dataclass(frozen=True, slots=True)
class Pack:
    """The input of one forward, with N scored tokens. The tokens are in the order of the sequences.

    Attributes:
        sequences: the packed sequences, in the order of their scored tokens.
        input_ids: (1, T) ids of a tree's nodes in depth-first order; or (B, L) ids of plain rows, padded at the end with zeros.
        position_ids: depth of each node, in the same shape.
        predictors: (N,) index of the node whose hidden state predicts each scored token. The index runs over all rows.
        targets: (N,) ids of the scored tokens.
        ends: (T,) for each node, the index after its last descendant. Node i sees node j if and only if j <= i < ends[j]. The
            tensor stays on the CPU, where attention is planned. None: the pack has plain rows with causal attention.
        pictures: the pictures of its placeholders; None: it has none. With pictures, `position_ids` may have one more
            dimension in front: the axes of the model's positions.
        predictors_on_host: `predictors` as the pack was made, if they have been moved to another device.
    """

    sequences: tuple[TrainingSequence, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor | None = None
    pictures: PackPictures | None = None
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
        """(N,) float32 values of the field `name` of the sequences, one value per token.

        Raises:
            ValueError: the field of a sequence is None, or does not have one value per token.
        """
        return sent(column(self.sequences, name), self.targets.device)

    def kept_ids(self) -> KeptIds:
        """One set of ids for each of the N tokens.

        Raises:
            ValueError: a sequence does not have one set per token.
        """
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

    The number of packs is the smallest that this order allows. The cuts repeat as few prompt positions as possible, and the packs
    have about the same size.

    Args:
        sequences: sequences with the same prompt must be adjacent; otherwise they share its positions only within a pack.
        token_budget: largest number of positions per forward. The memory of a forward and its backward grows with it. None: the
            usual numbers of this machine (`usual_token_budgets`).

    Raises:
        ValueError: a sequence has no prompt or no completion, or its mask has another length than its completion.
    """
    units = list(units_of(sequences))
    held = [s for unit in units for s in unit]
    numbers = _numbers(held)
    paths = SortedPaths.of([s.path if numbers is None else numbers.path(s) for s in held])
    counts = [len(unit) for unit in units]
    bounds = [0, *np.cumsum(counts).tolist()]
    budget, for_group = usual_token_budgets() if token_budget is None else (token_budget, token_budget)
    for run in cut_tree(paths, counts, [len(unit[0].prompt_ids) for unit in units], budget, for_group):
        members = range(bounds[run.start], bounds[run.stop])
        tree = paths.tree(members)
        own = [held[i] for i in members]
        ids, pictures = (tree.tokens, None) if numbers is None else numbers.split(tree.tokens)
        positions = torch.from_numpy(tree.depths)[None]
        if pictures is not None and (axes := position_ids(own, tree.nodes, len(ids))) is not None:
            positions = axes[:, None]
        yield Pack(
            sequences=tuple(own),
            input_ids=torch.from_numpy(ids)[None],
            position_ids=positions,
            predictors=_tensor([nodes[_ints(s.predictors)] for s, nodes in zip(own, tree.nodes, strict=True)]),
            targets=_tensor([_ints(s.sampled_ids) for s in own]),
            ends=torch.from_numpy(tree.ends),
            pictures=pictures,
        )


def pack_rows(sequences: Sequence[TrainingSequence], token_budget: int | None) -> Iterator[Pack]:
    """Yield packs of plain rows, for models that cannot attend within a tree. Rows are padded at the end. Short rows come first.

    Args:
        token_budget: largest number of positions of a pack, padding included. A unit that is larger gets a separate pack. None:
            the usual number of this machine.

    Raises:
        ValueError: a sequence has no prompt or no completion, or its mask has another length than its completion.
    """
    units = sorted(units_of(sequences), key=lambda unit: max(len(s.path) for s in unit))
    budget = usual_token_budgets()[0] if token_budget is None else token_budget
    for run in cut_rows([[len(s.path) for s in unit] for unit in units], budget):
        yield _rows([s for i in run for s in units[i]])


def _rows(held: list[TrainingSequence]) -> Pack:
    numbers = _numbers(held)
    paths = [_ints(s.path if numbers is None else numbers.path(s)) for s in held]
    ids = np.zeros((len(paths), max(len(path) for path in paths)), dtype=np.int64)
    for row, path in zip(ids, paths, strict=True):
        row[: len(path)] = path
    positions, pictures = torch.arange(ids.shape[1]).expand(len(held), -1), None
    if numbers is not None:
        ids, pictures = numbers.split(ids)
    if pictures is not None:
        nodes = [row * ids.shape[1] + np.arange(len(path)) for row, path in enumerate(paths)]
        if (axes := position_ids(held, nodes, ids.size)) is not None:
            positions = axes.unflatten(1, ids.shape)
    return Pack(
        sequences=tuple(held),
        input_ids=torch.from_numpy(ids),
        position_ids=positions,
        predictors=_tensor([row * ids.shape[1] + _ints(s.predictors) for row, s in enumerate(held)]),
        targets=_tensor([_ints(s.sampled_ids) for s in held]),
        pictures=pictures,
    )


def _numbers(sequences: Sequence[TrainingSequence]) -> PictureNumbers | None:
    """Numbers for the parts of pictures; None: no sequence has pictures."""
    return PictureNumbers(sequences) if any(s.pictures is not None for s in sequences) else None


def units_of(sequences: Sequence[TrainingSequence]) -> Iterator[list[TrainingSequence]]:
    """Yield the sequences of each unit as one list."""
    unit: list[TrainingSequence] = []
    for sequence in sequences:
        if not len(sequence.prompt_ids) or not sequence.length:
            raise ValueError(f"sequence {sequence.name} has no prompt or no completion")
        if sequence.sampled is not None and len(sequence.sampled) != len(sequence.completion_ids):
            raise ValueError(f"sequence {sequence.name} does not say of each of its ids whether it was sampled")
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
