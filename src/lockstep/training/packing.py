"""Where token ids become tensors: sequences that share a beginning share its positions.

Comes from: rollout groups. Goes to: `training/scoring.py`. All sequences of a pack form one tree of tokens, one row
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

import torch

from lockstep.engines.protocol import places_of
from lockstep.training.pack_plan import cut_rows, cut_tree
from lockstep.training.tree_attention import TreePlan, plan_attention


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One completion to learn from, or only to verify. Its tokens are those that were sampled.

    Attributes:
        name: the request's name.
        prompt_ids: ids before the completion.
        completion_ids: sampled ids, the end token included, and what was put between them.
        behaviour_logps: the engine's log-prob of each sampled id.
        advantages: of each sampled token; a method that has one for the whole completion repeats it.
        weight: weight of each of its tokens in the step's loss.
        old_logps: the policy's log-probs before the generation's first step; None: the learning forward's own are those.
        entropies: its entropies then, where a pass before the first step has scored the sequence: its tokens are proven.
        fresh: whether each token was sampled by the weights that learn from it; None: all were.
        ref_logps: the reference model's, where a method uses one.
        kept: whether each token is learned from, where a method leaves some out; None: all are.
        values, returns: a critic's value before each token and what it is to become, where a method has a critic.
        unit: sequences of one unit stand side by side and stay in one pack, since their loss is one; None: it is alone.
        sampled: whether each of `completion_ids` was sampled; None: all were.
    """

    name: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    behaviour_logps: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    weight: float = 0.0
    old_logps: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    fresh: tuple[bool, ...] | None = None
    ref_logps: tuple[float, ...] | None = None
    kept: tuple[bool, ...] | None = None
    values: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None
    unit: str | None = None
    sampled: tuple[bool, ...] | None = None

    @property
    def length(self) -> int:
        """Its tokens: how many ids were sampled."""
        return len(self.completion_ids) if self.sampled is None else sum(self.sampled)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Ids of its tokens."""
        return tuple(self.completion_ids[i] for i in self._places)

    @property
    def path(self) -> tuple[int, ...]:
        """Ids that a model has to see to predict all of its tokens."""
        return (*self.prompt_ids, *self.completion_ids[: self._places[-1]])

    @property
    def predictors(self) -> list[int]:
        """Where in `path` each of its tokens is predicted."""
        return [len(self.prompt_ids) - 1 + i for i in self._places]

    @property
    def _places(self) -> Sequence[int]:
        return places_of(self.sampled, len(self.completion_ids))


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


def column(sequences: Sequence[TrainingSequence], name: str) -> torch.Tensor:
    """(N,) float32: what sequences have under `name` for each of their tokens, one sequence after the other.

    Raises:
        ValueError: a sequence has nothing there, or not one value a token.
    """
    columns = [getattr(s, name) for s in sequences]
    for sequence, values in zip(sequences, columns, strict=True):
        if values is None or len(values) != sequence.length:
            raise ValueError(f"sequence {sequence.name} has no {name} for each of its tokens")
    return torch.tensor([value for values in columns for value in values], dtype=torch.float32)


def token_names(sequences: Sequence[TrainingSequence]) -> list[str]:
    """N names: the request that each token belongs to."""
    return [s.name for s in sequences for _ in range(s.length)]


class _Tree:
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

    def part(self, paths: Sequence[Sequence[int]]) -> tuple[_Tree, list[list[int]]]:
        """A tree of some of the paths alone, and their nodes in it."""
        tree, index = _Tree(), {-1: -1}
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


def pack_sequences(sequences: Sequence[TrainingSequence], token_budget: int) -> Iterator[Pack]:
    """Packs of at most `token_budget` nodes each, in the order given (a longer unit gets a pack of its own).

    There are as few as this order allows, cut where the least of a prompt is repeated, and about equal in size.

    Args:
        sequences: put those that share a prompt side by side, or they share it only within a pack.
        token_budget: bounds the (T, T) attention mask and the activations of one forward.

    Raises:
        ValueError: a sequence has no prompt or no completion, or a mask of another length.
    """
    whole, units = _Tree(), list(_units(sequences))
    paths = [[whole.insert(s.path) for s in unit] for unit in units]
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
        input_ids=torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths]),
        position_ids=torch.arange(longest).expand(len(held), -1),
        attention_mask=torch.tensor([[i < len(path) for i in range(longest)] for path in paths]),
        predictors=torch.tensor(places),
        targets=torch.tensor([token for s in held for token in s.sampled_ids]),
    )


def _units(sequences: Sequence[TrainingSequence]) -> Iterator[list[TrainingSequence]]:
    """Runs of sequences of one unit."""
    unit: list[TrainingSequence] = []
    for sequence in sequences:
        if not sequence.prompt_ids or not sequence.length:
            raise ValueError(f"sequence {sequence.name} has no prompt or no completion")
        if sequence.sampled is not None and len(sequence.sampled) != len(sequence.completion_ids):
            raise ValueError(f"sequence {sequence.name} does not say of each of its ids whether it was sampled")
        if unit and (sequence.unit is None or sequence.unit != unit[-1].unit):
            yield unit
            unit = []
        unit.append(sequence)
    if unit:
        yield unit


def _finish(tree: _Tree, held: list[TrainingSequence], places: list[int]) -> Pack:
    mask = tree.mask()
    return Pack(
        sequences=tuple(held),
        input_ids=torch.tensor([tree.tokens]),
        position_ids=torch.tensor([tree.depths]),
        attention_mask=mask[None, None],
        predictors=torch.tensor(places),
        targets=torch.tensor([token for s in held for token in s.sampled_ids]),
        tree=plan_attention(mask),
    )
