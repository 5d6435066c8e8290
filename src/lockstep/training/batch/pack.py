"""Where token ids become tensors: sequences that share a beginning share its positions.

Comes from: rollout groups. Goes to: `training/forward/scoring.py`. All sequences of a pack form one tree of tokens, one row
position per node. A token attends to its ancestors, its position id is its depth, so each branch sees exactly what it would
see alone. There are no pad tokens, a prompt goes through the model once however many completions it has, worked examples that
all prompts repeat go through once, and so do equal completions. The last token of a completion predicts nothing that is
trained on and takes no position. Models that cannot attend within a tree get plain rows instead.

A pack says who sees whom by one integer per node, and knows nothing of how attention is computed.

Tokens of a completion that nobody sampled (`rollouts/interruptions.py`) are attended to like a prompt's and are not scored. This is
the one place that knows of them: what comes out of a pack, and every column that goes into it, is of sampled tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lockstep.training.batch.pack_plan import cut_rows, cut_tree
from lockstep.training.batch.sequence import TrainingSequence, column
from lockstep.training.batch.tree import Ints, SortedPaths


@dataclass(frozen=True, slots=True)
class Pack:
    """What goes through the model at once; N scored tokens (those of each sequence in turn).

    Attributes:
        sequences: what is packed, in the order of the scored tokens.
        input_ids: (1, T) ids of a tree's nodes in depth-first order; of plain rows (B, L), zeros behind the shorter ones.
        position_ids: the same shape, depth of each node.
        predictors: (N,) node whose hidden state predicts each scored token, counted through all rows.
        targets: (N,) ids of the scored tokens.
        ends: (T,) one past the last node below each node: node i sees node j if and only if j <= i < ends[j]. It stays on the
            CPU, where attention is planned. None: plain rows, each of which sees what stands before it.
    """

    sequences: tuple[TrainingSequence, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) scored tokens of each sequence."""
        return torch.tensor([s.length for s in self.sequences], device=self.targets.device)

    def column(self, name: str) -> torch.Tensor:
        """(N,) float32: what each sequence has under `name` for each of its tokens.

        Raises:
            ValueError: as `column`.
        """
        return column(self.sequences, name).to(self.targets.device)

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        names = ("input_ids", "position_ids", "predictors", "targets")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved)


def pack_sequences(sequences: Sequence[TrainingSequence], token_budget: int) -> Iterator[Pack]:
    """Packs of at most `token_budget` nodes each, in the order given (a longer unit gets a pack of its own).

    There are as few as this order allows, cut where the least of a prompt is repeated, and about equal in size.

    Args:
        sequences: put those that share a prompt side by side, or they share it only within a pack.
        token_budget: most positions that go through the model at once; the memory of a forward and its backward grows with them.

    Raises:
        ValueError: a sequence has no prompt or no completion, or a mask of another length.
    """
    units = list(_units(sequences))
    held = [s for unit in units for s in unit]
    paths = SortedPaths.of([s.path for s in held])
    counts = [len(unit) for unit in units]
    bounds = [0, *np.cumsum(counts).tolist()]
    for run in cut_tree(paths, counts, [len(unit[0].prompt_ids) for unit in units], token_budget):
        members = range(bounds[run.start], bounds[run.stop])
        tree = paths.tree(members)
        own = [held[i] for i in members]
        yield Pack(
            sequences=tuple(own),
            input_ids=torch.from_numpy(tree.tokens)[None],
            position_ids=torch.from_numpy(tree.depths)[None],
            predictors=_tensor([nodes[_ints(s.predictors)] for s, nodes in zip(own, tree.nodes, strict=True)]),
            targets=_tensor([_ints(s.sampled_ids) for s in own]),
            ends=torch.from_numpy(tree.ends),
        )


def pack_rows(sequences: Sequence[TrainingSequence], token_budget: int) -> Iterator[Pack]:
    """Packs of plain rows, padded behind, shortest first, for models whose layers cannot be told of a tree.

    Args:
        token_budget: most positions of a pack, padding included (a longer unit gets a pack of its own).

    Raises:
        ValueError: a sequence has no prompt or no completion, or a mask of another length.
    """
    units = sorted(_units(sequences), key=lambda unit: max(len(s.path) for s in unit))
    for run in cut_rows([[len(s.path) for s in unit] for unit in units], token_budget):
        yield _rows([s for i in run for s in units[i]])


def _rows(held: list[TrainingSequence]) -> Pack:
    paths = [_ints(s.path) for s in held]
    ids = np.zeros((len(paths), max(len(path) for path in paths)), dtype=np.int64)
    for row, path in zip(ids, paths, strict=True):
        row[: len(path)] = path
    return Pack(
        sequences=tuple(held),
        input_ids=torch.from_numpy(ids),
        position_ids=torch.arange(ids.shape[1]).expand(len(held), -1),
        predictors=_tensor([row * ids.shape[1] + _ints(s.predictors) for row, s in enumerate(held)]),
        targets=_tensor([_ints(s.sampled_ids) for s in held]),
    )


def _units(sequences: Sequence[TrainingSequence]) -> Iterator[list[TrainingSequence]]:
    """Runs of sequences of one unit."""
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
