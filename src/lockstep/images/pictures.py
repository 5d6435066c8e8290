"""The pictures of one prompt, as a model takes them.

They are made once, and travel with the prompt: in the request to the engine, in its answer, and in the training
sequence. Engine and trainer therefore use the same tensors. The digest of a picture's tensors is its identity on both
sides: it is the key of the engine's caches, and a part of what makes two nodes of a packed tree equal.

Between ranks, a picture travels only if no prompt of the data has it, and once for all completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

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
    """The pictures of one prompt, and where they are in it. It is false if there are none.

    The prompt of a later turn of a conversation is all ids before the turn. A branch of a rollout has the pictures of
    its last turn's prompt: those of its earlier turns are the first ones of them, in the same places.

    Attributes:
        pictures: in the order of their placeholders.
        places: (F,) int64, index in the prompt's ids of every placeholder. Other ids may stand between those of one
            picture.
        placeholder: the id that stands for a part of a picture; -1, which is no id, if there are none.
        positions: (axes, P) int64 position ids of the prompt, from the model's own function. None: the model counts
            the ids of a prompt with pictures as those of any text.
        delta: what the model adds to the index of a token after the prompt to get its position on every axis.
    """

    pictures: tuple[Picture, ...] = ()
    places: Ids = field(default_factory=lambda: whole_numbers([]))
    placeholder: int = -1
    positions: np.ndarray | None = None
    delta: int = 0

    def __bool__(self) -> bool:
        return bool(self.pictures)

    @property
    def places_of_each(self) -> list[Ids]:
        """The places of the placeholders of each picture, in order."""
        if not self.pictures:
            return []
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


NO_PICTURES = PromptPictures()

# Of each completion: it has no pictures, or those of its prompt. Otherwise the index of what it was shown.
_NONE, _OWN = -1, -2
# The pictures of a completion, and those of its prompt.
Pair = tuple[PromptPictures, PromptPictures]


def picture_to_wire(picture: Picture) -> dict[str, Any]:
    """The pixels of one picture, with what they say of its place in a prompt."""
    arrays = {"pixel_values": picture.pixel_values.numpy(), "grid": picture.grid.numpy()}
    return {**arrays, "tokens": picture.tokens}


def picture_from_wire(data: Mapping[str, Any]) -> Picture:
    """The picture of `picture_to_wire`. The caller compares its digest."""
    # A model may write into tensors, and the arrays of a message are read-only.
    pixels, grid = (torch.from_numpy(np.array(data[name])) for name in ("pixel_values", "grid"))
    return Picture(pixels, grid, data["tokens"])


def pictures_to_wire(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the completions were shown, by completion, and the pictures that no prompt of the data has."""
    known = {digest for _, own in pairs for digest in own.digests}
    others: dict[int, PromptPictures] = {}
    places: list[int] = []
    for shown, own in pairs:
        if not shown:
            places.append(_NONE)
        elif shown is own or _equal(shown, own):
            places.append(_OWN)
        else:
            others.setdefault(id(shown), shown)
            places.append(list(others).index(id(shown)))
    pictures = {p.digest: p for shown in others.values() for p in shown.pictures if p.digest not in known}
    return {
        "shown": places,
        "others": [
            {
                "digests": list(shown.digests),
                "places": shown.places,
                "placeholder": shown.placeholder,
                "positions": shown.positions,
                "delta": shown.delta,
            }
            for shown in others.values()
        ],
        "pictures": [picture_to_wire(picture) for picture in pictures.values()],
    }


def pictures_from_wire(data: Mapping[str, Any], owns: Sequence[PromptPictures]) -> Iterator[PromptPictures]:
    """What each completion was shown, in order. `owns` are the pictures of each completion's prompt.

    Raises:
        ValueError: a picture is missing or has changed, or a completion has the pictures of a prompt that has none.
    """
    known = {p.digest: p for own in owns for p in own.pictures}
    for found in data["pictures"]:
        picture = picture_from_wire(found)
        # A picture that changed on its way has another digest, and is missing below.
        known[picture.digest] = picture
    if missing := {digest for shown in data["others"] for digest in shown["digests"]} - known.keys():
        raise ValueError(f"{len(missing)} pictures did not arrive")
    others = [
        PromptPictures(
            tuple(known[digest] for digest in shown["digests"]),
            whole_numbers(shown["places"]),
            shown["placeholder"],
            shown["positions"],
            shown["delta"],
        )
        for shown in data["others"]
    ]
    if len(data["shown"]) != len(owns):
        raise ValueError(f"{len(data['shown'])} completions with pictures or without, instead of {len(owns)}")
    for place, own in zip(data["shown"], owns, strict=True):
        if place == _OWN and not own:
            raise ValueError("a completion was shown the pictures of a prompt that has none")
        yield own if place == _OWN else NO_PICTURES if place == _NONE else others[place]


def _equal(one: PromptPictures, other: PromptPictures) -> bool:
    return one.digests == other.digests and np.array_equal(one.places, other.places)
