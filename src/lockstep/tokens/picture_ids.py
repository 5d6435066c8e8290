"""Puts the ids of pictures into the ids of a conversation. These ids come from the picture, not from the tokenizer.

`images/` makes the pictures. A message contains a picture as the part `{"type": "image", "picture": …}`. The chat
template writes one placeholder for it. This module replaces the placeholder by the picture's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids, whole_numbers

# The key of a processed picture in a part of a message. The chat template does not get it.
PICTURE = "picture"


class HasPictureIds(Protocol):
    """A processed picture. Only its ids are used here."""

    @property
    def ids(self) -> Ids:
        """(N,) ids that stand for the picture in a conversation."""


def picture_part(picture: HasPictureIds) -> dict[str, Any]:
    """The part of a message's content that shows a picture."""
    return {"type": "image", PICTURE: picture}


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The processed pictures of messages, in the order in which the messages show them."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part[PICTURE] for part in parts if isinstance(part, Mapping) and PICTURE in part]


def with_picture_ids(ids: Ids, placeholder: int, pictures: Sequence[HasPictureIds]) -> Ids:
    """Ids in which each placeholder is replaced by the ids of its picture.

    Args:
        ids: (N,) ids with one placeholder per picture.

    Raises:
        InputError: there are more or fewer placeholders than pictures.
    """
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(pictures):
        raise InputError(
            f"the text has {len(places)} placeholders for {len(pictures)} pictures: the chat template does not write one per image "
            "part, or a prompt of plain text does not contain one per picture"
        )
    if not pictures:
        return ids
    pieces = np.split(ids, places)
    joined = [
        pieces[0],
        *(part for own, piece in zip(pictures, pieces[1:], strict=True) for part in (own.ids, piece[1:])),
    ]
    return whole_numbers(np.concatenate(joined))
