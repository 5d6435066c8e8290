"""The rules of a sampling distribution (`training/forward/filters/id_rules.py`) for the rows of a pack.

They are made from a pack, and applied to whole logits, one chunk of rows at a time. With kept ids they are applied to
the logits of these ids alone. A row is what predicts a token: a node of the pack's tree, and the length of the prompt,
because branches of two prompts may share a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.filters.id_rules import BANNED, CompletionRules, IdRules, Moves


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of the whole logits of a chunk of R rows.

    Attributes:
        sampling: the run's settings.
        rows, ids: (E,) places of the moved logits.
        moves: how they are moved.
        banned: (R, V) bool, the ids that cannot be sampled; None: no id is banned.
    """

    sampling: Sampling
    rows: torch.Tensor
    ids: torch.Tensor
    moves: Moves
    banned: torch.Tensor | None

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Change (R, V) logits in place. Returns the (E,) derivatives of the moved logits by the logits."""
        before = logits[self.rows, self.ids]
        logits[self.rows, self.ids] = self.moves.applied(before, self.sampling)
        if self.banned is not None:
            logits.masked_fill_(self.banned, BANNED)
        return self.moves.slopes(before, self.sampling)


class RowRules:
    """The rules for the rows of several completions.

    Args:
        rules: the rules of the run.
        sequences: the completions.
        owners: (R,) the completion of each row.
        positions: (R,) how many ids of that completion were sampled before the row's token.

    Attributes:
        support: (R,) number of ids that can be sampled in each row. A chunk's edits fill it in.

    Raises:
        InputError: a completion has inserted ids, and a rule counts the sampled ones.
    """

    def __init__(self, rules: IdRules, sequences: tuple[TrainingSequence, ...], owners: Ids, positions: Ids) -> None:
        self.rules = rules
        self._owners, self._positions = owners, positions
        self._completions = [completion_rules(rules, sequence) for sequence in sequences]
        self.support = torch.full((len(owners),), rules.vocabulary)

    def edits(self, start: int, end: int, device: torch.device) -> Edits:
        """The edits of the rows from `start` up to `end`, without `end`."""
        rows, ids, moves, banned = [], [], [], []
        for completion, places in self._by_completion(start, end):
            positions = self._positions[start + places]
            if self.rules.moves_logits:
                movable = completion.movable
                ids.append(np.tile(movable, len(places)))
                rows.append(np.repeat(places, len(movable)))
                moves.append(completion.moves(ids[-1], np.repeat(positions, len(movable))))
            if self.rules.bans_ids:
                banned.append((torch.from_numpy(places), completion.banned(positions)))
        mask = None
        if banned:
            mask = torch.empty(end - start, self.rules.vocabulary, dtype=torch.bool)
            for where, part in banned:
                mask[where] = part
            self.support[start:end] = self.rules.vocabulary - mask.sum(1)
            mask = mask.to(device)
        moved = joined_moves(moves).to(device)
        return Edits(self.rules.sampling, _tensor(rows, device), _tensor(ids, device), moved, mask)

    def _by_completion(self, start: int, end: int) -> Iterator[tuple[CompletionRules, Ids]]:
        """Yield each completion with its rows between `start` and `end`, counted from `start`."""
        owners = self._owners[start:end]
        for owner in np.unique(owners):
            yield self._completions[owner], np.flatnonzero(owners == owner)


def completion_rules(rules: IdRules, sequence: TrainingSequence) -> CompletionRules:
    """The rules of a sequence's completion.

    Raises:
        InputError: the completion has inserted ids, and a rule counts the sampled ones.
    """
    inserted = sequence.sampled is not None and not sequence.sampled.all()
    if inserted and (names := rules.sampling.counting_fields):
        raise InputError(
            f"completion {sequence.name} has ids that were not sampled; {' and '.join(names)} can be used with completions of one "
            "call only: leave them out of runs with tools or interruptions"
        )
    return rules.of(sequence.prompt_ids, sequence.completion_ids, sequence.sampled)


def moves_of_kept(rules: IdRules, sequences: tuple[TrainingSequence, ...], device: torch.device) -> Moves:
    """(M,) moves of the kept ids of several completions, set after set."""
    found = []
    for sequence in sequences:
        assert sequence.kept_ids is not None
        completion, kept = completion_rules(rules, sequence), sequence.kept_ids
        found.append(completion.moves(kept.ids.astype(np.int64), kept.tokens))
    return joined_moves(found).to(device)


def joined_moves(parts: list[Moves]) -> Moves:
    """The moves of all parts, in order."""
    if not parts:
        return Moves(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0))
    return Moves(*(torch.cat([getattr(part, name) for part in parts]) for name in ("bias", "seen", "counts")))


def _tensor(parts: list[Ids], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *parts])).to(device)
