"""Pictures in packs: which nodes of a tree are parts of pictures, and which part of which picture each one is.

All parts of all pictures have the same placeholder id. While paths are compared, each part therefore has a number of
its own in place of the id: two nodes are one node only if they are the same part of the same picture, by its digest.
The numbers exist inside this module and the tree only; packs contain ids again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.images.pictures import Picture
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.batch.tree import Ints

# Larger than any id, and small enough for `SortedPaths`, which compares 32 bits.
_FIRST = 1 << 30


@dataclass(frozen=True, slots=True)
class PackPictures:
    """The pictures of one pack.

    Attributes:
        pictures: each picture once, however many sequences show it.
        rows: (F,) int64, for each placeholder of the pack's `input_ids` in order, the row of its vector among the vectors of all
            `pictures`.
    """

    pictures: tuple[Picture, ...]
    rows: torch.Tensor


class PictureNumbers:
    """Numbers for all parts of the pictures of some sequences.

    Args:
        sequences: at least one has pictures. No placeholder was sampled in them.
    """

    def __init__(self, sequences: Sequence[TrainingSequence]) -> None:
        shown = [s.pictures for s in sequences if s.pictures is not None]
        self._pictures = list({p.digest: p for pictures in shown for p in pictures.pictures}.values())
        self._ends = np.cumsum([p.tokens for p in self._pictures])
        starts = self._ends - [p.tokens for p in self._pictures]
        self._starts = {p.digest: int(start) for p, start in zip(self._pictures, starts, strict=True)}
        self._placeholder = shown[0].placeholder

    def path(self, sequence: TrainingSequence) -> Ints:
        """`sequence.path` with the number of each part of a picture in place of its id."""
        path = np.array(sequence.path, dtype=np.int64)
        if sequence.pictures is not None:
            for picture, places in zip(sequence.pictures.pictures, sequence.pictures.places_of_each, strict=True):
                number = _FIRST + self._starts[picture.digest]
                path[places] = np.arange(number, number + picture.tokens)
        return path

    def split(self, numbered: Ints) -> tuple[Ints, PackPictures | None]:
        """The ids of a pack's nodes, and its pictures; None: it has none.

        Args:
            numbered: the nodes as `path` numbers them, in any shape.
        """
        parts = numbered[numbered >= _FIRST] - _FIRST
        if not len(parts):
            return numbered, None
        owners = np.searchsorted(self._ends, parts, side="right")
        present, places = np.unique(owners, return_inverse=True)
        pictures = tuple(self._pictures[i] for i in present)
        sizes = np.array([p.tokens for p in pictures])
        own_starts = np.cumsum(sizes) - sizes
        all_starts = self._ends[present] - sizes
        rows = parts - all_starts[places] + own_starts[places]
        ids = np.where(numbered >= _FIRST, self._placeholder, numbered)
        return ids, PackPictures(pictures, torch.from_numpy(rows))


def position_ids(sequences: Sequence[TrainingSequence], nodes: Sequence[Ints], size: int) -> torch.Tensor | None:
    """(axes, size) position ids of a pack's nodes; None: the model counts them as those of any text.

    Args:
        nodes: the nodes of each sequence's path, among all nodes of the pack.
    """
    known = next(s.pictures.positions for s in sequences if s.pictures is not None)
    if known is None:
        return None
    axes = len(known)
    found = np.zeros((axes, size), dtype=np.int64)
    for sequence, own in zip(sequences, nodes, strict=True):
        found[:, own] = np.arange(len(own)) if sequence.pictures is None else sequence.pictures.positions_of(len(own))
    return torch.from_numpy(found)
