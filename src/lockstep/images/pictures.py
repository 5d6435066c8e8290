"""The pictures of one prompt, as a model takes them.

They are made once, and travel with the prompt: in the request to the engine, in its answer, and in the training
sequence. Engine and trainer therefore use the same tensors. The digest of a picture's tensors is its identity on both
sides: it is the key of the engine's caches, and a part of what makes two nodes of a packed tree equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
import xxhash

from lockstep.tokens.arrays import Ids, whole_numbers


@dataclass(frozen=True, eq=False)
class Picture:
    """One processed picture.

    Attributes:
        pixel_values: float32, scaled and normalised by the model's image processor: (patches, width), or (tiles,
            channels, height, width) of a family that cuts pictures into tiles.
        grid: (3,) int64, number of patches or tiles along time, height and width. A picture of one tile has height
            and width 0.
        tokens: number of placeholder ids that stand for the picture in a prompt.
        ids: all ids that stand for it: the placeholders, and the marks that some families write between tiles. Empty
            where only the pixels count.
    """

    pixel_values: torch.Tensor
    grid: torch.Tensor
    tokens: int
    ids: Ids = field(default_factory=lambda: whole_numbers([]))

    @property
    def in_tiles(self) -> bool:
        """Whether the pixels are tiles. Otherwise they are patches."""
        return self.pixel_values.dim() == 4

    @cached_property
    def pieces(self) -> tuple[Picture, ...]:
        """The parts that a vision tower computes alone: each tile as a picture of one tile, or the picture itself.

        The placeholders of a piece stand side by side in a prompt, without other ids between them.
        """
        if not self.in_tiles or len(self.pixel_values) == 1:
            return (self,)
        tokens = self.tokens // len(self.pixel_values)
        return tuple(Picture(tile, torch.tensor([1, 0, 0]), tokens) for tile in self.pixel_values.split(1))

    @cached_property
    def digest(self) -> str:
        """Hex xxh3-128 of the grid and of every byte of the pixels. Equal digests mean equal pictures."""
        content = xxhash.xxh3_128(self.grid.numpy().tobytes())
        content.update(self.pixel_values.numpy().tobytes())
        return content.hexdigest()


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """The pictures of one prompt, and where they are in it.

    The prompt of a later turn of a conversation is all ids before the turn. A branch of a rollout has the pictures of
    its last turn's prompt: those of its earlier turns are the first ones of them, in the same places.

    Attributes:
        pictures: at least one, in the order of their placeholders.
        places: (F,) int64, index in the prompt's ids of every placeholder. Other ids may stand between those of one
            picture.
        placeholder: the id that stands for a part of a picture.
        positions: (axes, P) int64 position ids of the prompt, from the model's own function. None: the model counts
            the ids of a prompt with pictures as those of any text.
        delta: what the model adds to the index of a token after the prompt to get its position on every axis.
    """

    pictures: tuple[Picture, ...]
    places: Ids
    placeholder: int
    positions: np.ndarray | None = None
    delta: int = 0

    @property
    def places_of_each(self) -> list[Ids]:
        """The places of the placeholders of each picture, in order."""
        return np.split(self.places, np.cumsum([picture.tokens for picture in self.pictures])[:-1])

    @cached_property
    def in_pieces(self) -> PromptPictures:
        """The same placeholders with the pieces of all pictures as pictures of their own, as vLLM gets them."""
        return replace(self, pictures=tuple(piece for picture in self.pictures for piece in picture.pieces))

    @property
    def starts(self) -> Ids:
        """(n,) int64, index in the prompt's ids of the first placeholder of each picture."""
        return whole_numbers([places[0] for places in self.places_of_each])

    @property
    def digests(self) -> tuple[str, ...]:
        """The identity of each picture, in order."""
        return tuple(picture.digest for picture in self.pictures)

    def digests_before(self, place: int) -> tuple[str, ...]:
        """The identity of each picture whose first placeholder is before a place in the prompt's ids, in order."""
        return self.digests[: int(np.count_nonzero(self.starts < place))]

    def positions_of(self, length: int) -> np.ndarray:
        """(axes, length) int64 position ids of the prompt and of the text after it.

        Raises:
            ValueError: the model counts the ids as those of any text.
        """
        if self.positions is None:
            raise ValueError("this model has one position per id")
        known = self.positions[:, :length]
        after = np.arange(known.shape[1], length) + self.delta
        return np.concatenate([known, np.broadcast_to(after, (len(known), len(after)))], axis=1)


def pixel_inputs(pictures: Sequence[Picture], device: torch.device) -> dict[str, torch.Tensor]:
    """The pixels of at least one picture of one family, as the vision tower of a model of transformers takes them."""
    pixels = torch.cat([p.pixel_values for p in pictures]).to(device)
    if pictures[0].in_tiles:
        # The model takes rows of tiles, and fills the placeholders of all rows in the order of all tiles.
        return {"pixel_values": pixels[None]}
    return {"pixel_values": pixels, "image_grid_thw": torch.stack([p.grid for p in pictures]).to(device)}


def model_inputs(
    shown: Iterable[PromptPictures | None], input_ids: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """The arguments by which a model of transformers takes pictures in its own forward.

    Args:
        shown: the pictures of each row; None: the row has none. At least one has pictures.
        input_ids: (B, L) ids. Their placeholders are those of the pictures.
    """
    known = [pictures for pictures in shown if pictures is not None]
    inputs = pixel_inputs([picture for pictures in known for picture in pictures.pictures], input_ids.device)
    if known[0].positions is None:
        return inputs
    # Without these marks the model would count positions in one dimension, and say nothing.
    return {**inputs, "mm_token_type_ids": (input_ids == known[0].placeholder).int()}
