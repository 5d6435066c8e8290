"""The pictures of one prompt, as a model takes them.

`images/prompts.py` makes them once per prompt. They travel with the prompt: in the request to the engine, in its answer, and in the
training sequence. Engine and trainer therefore use the same tensors. The digest of a picture's tensors is its identity on both
sides: it is the key of the engine's caches, and a part of what makes two nodes of a packed tree equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xxhash

from lockstep.tokens.arrays import Ids, whole_numbers


@dataclass(frozen=True, eq=False)
class Picture:
    """One processed picture.

    Attributes:
        pixel_values: (patches, width) float32, scaled and normalised by the model's image processor.
        grid: (3,) int64, number of patches along time, height and width.
        tokens: number of placeholder ids that stand for the picture in a prompt.
    """

    pixel_values: torch.Tensor
    grid: torch.Tensor
    tokens: int

    @cached_property
    def digest(self) -> str:
        """Hex xxh3-128 of the grid and of every byte of the pixels. Equal digests mean equal pictures."""
        content = xxhash.xxh3_128(self.grid.numpy().tobytes())
        content.update(self.pixel_values.numpy().tobytes())
        return content.hexdigest()


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """The pictures of one prompt, and where they are in it.

    Attributes:
        pictures: at least one, in the order of their placeholders.
        starts: (n,) int64, index in the prompt's ids of the first placeholder of each picture.
        placeholder: the id that stands for a part of a picture.
        positions: (axes, P) int64 position ids of the prompt, from the model's own function.
        delta: what the model adds to the index of a token after the prompt to get its position on every axis.
    """

    pictures: tuple[Picture, ...]
    starts: Ids
    placeholder: int
    positions: np.ndarray
    delta: int

    @property
    def digests(self) -> tuple[str, ...]:
        """The identity of each picture, in order."""
        return tuple(picture.digest for picture in self.pictures)

    def positions_of(self, length: int) -> np.ndarray:
        """(axes, length) int64 position ids of the prompt and of the text after it."""
        known = self.positions[:, :length]
        after = np.arange(known.shape[1], length) + self.delta
        return np.concatenate([known, np.broadcast_to(after, (len(known), len(after)))], axis=1)


def expanded(ids: Ids, placeholder: int, pictures: Sequence[Picture]) -> tuple[Ids, Ids]:
    """Ids in which each placeholder stands once per token of its picture, and the index of each picture's first placeholder.

    Args:
        ids: the ids of a prompt, with one placeholder per picture.
    """
    places = np.flatnonzero(ids == placeholder)
    counts = np.array([picture.tokens for picture in pictures], dtype=np.int64)
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = counts
    return whole_numbers(np.repeat(ids, repeats)), whole_numbers(places + np.cumsum(counts - 1) - (counts - 1))


def model_inputs(shown: Iterable[PromptPictures | None], input_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The arguments by which a model of transformers takes pictures in its own forward.

    Args:
        shown: the pictures of each row, in the order of the rows; None: the row has none. At least one has pictures.
        input_ids: (B, L) ids. Their placeholders are those of the pictures.
    """
    known = [pictures for pictures in shown if pictures is not None]
    own = [picture for pictures in known for picture in pictures.pictures]
    return {
        "pixel_values": torch.cat([p.pixel_values for p in own]).to(input_ids.device),
        "image_grid_thw": torch.stack([p.grid for p in own]).to(input_ids.device),
        # Without these marks the model would count positions in one dimension, and say nothing.
        "mm_token_type_ids": (input_ids == known[0].placeholder).int(),
    }
