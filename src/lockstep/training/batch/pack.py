"""Where token ids become tensors: sequences that share a beginning share its positions.

Comes from: rollout groups. Goes to: `training/forward/scoring.py`. All sequences of a pack form one tree of tokens, one row
position a node. A token attends to its ancestors, its position id is its depth, so each branch sees exactly what it would
see alone. There are no pad tokens, a prompt goes through the model once however many completions it has, worked examples that
all prompts repeat go through once, and so do equal completions. The last token of a completion predicts nothing that is
trained on and takes no position. Models that cannot attend within a tree get plain rows instead.

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
from lockstep.training.batch.tree import TokenTree
from lockstep.training.forward.tree_attention import TreePlan, plan_attention


@dataclass(frozen=True, slots=True)
class Pack:
    """What goes through the model at once; N scored tokens (those of each sequence in turn).

    Attributes:
        sequences: what is packed, in the order of the scored tokens.
        input_ids: (1, T) nodes of a tree; of plain rows (B, L).
        position_ids: the same shape, depth of each node.
        attention_mask: (1, 1, T, T) bool, True where the row's node may see the column's; of plain rows (B, L), False at padding.
        predictors: (N,) node whose hidden state predicts each scored token, counted through all rows.
        targets: (N,) ids of the scored tokens.
        tree: how attention skips what the mask hides; None: the mask alone says it.
    """

    sequences: tuple[TrainingSequence, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    tree: TreePlan | None = None

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
        names = ("input_ids", "position_ids", "attention_mask", "predictors", "targets")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        tree = self.tree.to(device) if self.tree is not None else None
        return replace(self, **moved, tree=tree)


def pack_sequences(sequences: Sequence[TrainingSequence], token_budget: int) -> Iterator[Pack]:
    """Packs of at most `token_budget` nodes each, in the order given (a longer unit gets a pack of its own).

    There are as few as this order allows, cut where the least of a prompt is repeated, and about equal in size.

    Args:
        sequences: put those that share a prompt side by side, or they share it only within a pack.
        token_budget: bounds the (T, T) attention mask and the activations of one forward.

    Raises:
        ValueError: a sequence has no prompt or no completion, or a mask of another length.
    """
    whole, units = TokenTree(), list(_units(sequences))
    paths = [[whole.insert(s.path.tolist()) for s in unit] for unit in units]
    for run in cut_tree(paths, [len(unit[0].prompt_ids) for unit in units], token_budget):
        held = [s for i in run for s in units[i]]
        tree, own = whole.part([path for i in run for path in paths[i]])
        places: list[int] = []
        for sequence, nodes in zip(held, own, strict=True):
            places += [nodes[i] for i in sequence.predictors]
        yield _finish(tree, held, places)


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
    paths = [s.path for s in held]
    longest = max(len(path) for path in paths)
    places = [row * longest + place for row, s in enumerate(held) for place in s.predictors]
    return Pack(
        sequences=tuple(held),
        input_ids=torch.tensor([[*path.tolist(), *[0] * (longest - len(path))] for path in paths]),
        position_ids=torch.arange(longest).expand(len(held), -1),
        attention_mask=torch.tensor([[i < len(path) for i in range(longest)] for path in paths]),
        predictors=torch.tensor(places),
        targets=torch.from_numpy(np.concatenate([s.sampled_ids for s in held])),
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


def _finish(tree: TokenTree, held: list[TrainingSequence], places: list[int]) -> Pack:
    mask = tree.mask()
    return Pack(
        sequences=tuple(held),
        input_ids=torch.tensor([tree.tokens]),
        position_ids=torch.tensor([tree.depths]),
        attention_mask=mask[None, None],
        predictors=torch.tensor(places),
        targets=torch.from_numpy(np.concatenate([s.sampled_ids for s in held])),
        tree=plan_attention(mask),
    )
