"""The pictures of completions in JSON types and arrays, and back, for ranks that did not sample them.

The pictures of a prompt are not sent: every rank has read them, and finds them by the prompt's id. A completion whose
pictures are not those of its prompt sends them, each picture once for all completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.images.pictures import Picture, PromptPictures
from lockstep.tokens.arrays import whole_numbers

# Of each completion: it has no pictures, or those of its prompt. Otherwise the index of what it was shown.
_NONE, _OWN = -1, -2
# The pictures of a completion, and those of its prompt.
Pair = tuple[PromptPictures | None, PromptPictures | None]


def picture_to_wire(picture: Picture) -> dict[str, Any]:
    """The pixels of one picture, with what they say of its place in a prompt."""
    return {"pixel_values": picture.pixel_values.numpy(), "grid": picture.grid.numpy(), "tokens": picture.tokens}


def picture_from_wire(data: Mapping[str, Any]) -> Picture:
    """The picture of `picture_to_wire`. The caller compares its digest."""
    # A model may write into tensors, and the arrays of a message are read-only.
    pixels, grid = (torch.from_numpy(np.array(data[name])) for name in ("pixel_values", "grid"))
    return Picture(pixels, grid, data["tokens"])


def pictures_to_wire(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the completions were shown, by completion, and the pictures that no prompt of the data has."""
    known = {digest for _, own in pairs if own is not None for digest in own.digests}
    others: dict[int, PromptPictures] = {}
    places: list[int] = []
    for shown, own in pairs:
        if shown is None:
            places.append(_NONE)
        elif own is not None and (shown is own or _equal(shown, own)):
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


def pictures_from_wire(
    data: Mapping[str, Any], owns: Sequence[PromptPictures | None]
) -> Iterator[PromptPictures | None]:
    """What each completion was shown, in order.

    Args:
        owns: the pictures of each completion's prompt.

    Raises:
        ValueError: a picture is missing or has changed, or a completion has the pictures of a prompt that has none.
    """
    known = {p.digest: p for own in owns if own is not None for p in own.pictures}
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
        if place == _OWN and own is None:
            raise ValueError("a completion was shown the pictures of a prompt that has none")
        yield own if place == _OWN else None if place == _NONE else others[place]


def _equal(one: PromptPictures, other: PromptPictures) -> bool:
    return one.digests == other.digests and np.array_equal(one.places, other.places)
