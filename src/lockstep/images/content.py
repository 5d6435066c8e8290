"""What the model reads of a value that a user's code returned: text and images, in order.

An image is opened and processed in the thread of that code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from lockstep.errors import InputError
from lockstep.images.pictures import Picture
from lockstep.images.urls import to_data_url
from lockstep.tokens.arrays import whole_numbers
from lockstep.tokens.chat import Content as MessageContent
from lockstep.tokens.chat import picture_part


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An image that the model sees: a `data:` URL for messages that are kept, and what the model takes."""

    url: str
    picture: Picture


# Opens and processes the images of one result: each opened image, and the image as the model takes it.
Process = Callable[[Sequence[Any]], Iterable[tuple[Image.Image, Picture]]]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Text and images, in order."""

    parts: tuple[str | Seen, ...]

    @property
    def text(self) -> str:
        """The text alone."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> int:
        """The number of images."""
        return sum(not isinstance(part, str) for part in self.parts)

    def shown(self, longest: int) -> MessageContent:
        """The content of a message, as the chat template takes it. Each text is cut after `longest` characters."""
        return self._content(longest, lambda seen: picture_part(seen.picture))

    def kept(self, longest: int) -> MessageContent:
        """The content of a message that is kept, in JSON types. `longest` as in `shown`."""
        return self._content(longest, lambda seen: {"type": "image", "image": seen.url})

    def _content(self, longest: int, of_image: Callable[[Seen], dict[str, Any]]) -> MessageContent:
        if all(isinstance(part, str) for part in self.parts):
            return self.text[:longest]
        return [
            {"type": "text", "text": part[:longest]} if isinstance(part, str) else of_image(part)
            for part in self.parts
        ]


def content_of(result: Any, process: Process) -> Content:
    """What the model reads of a tool's result: an image, content blocks, or else `str(result)`, as in TRL."""
    if isinstance(result, Image.Image):
        return content_of_blocks([{"type": "image", "image": result}], process)
    parts = result if isinstance(result, list) else []
    if parts and all(isinstance(part, dict) and "type" in part for part in parts):
        return content_of_blocks(parts, process)
    return Content((printable(str(result)),))


def content_of_blocks(blocks: Sequence[Mapping[str, Any]], process: Process) -> Content:
    """What the model reads of content blocks.

    Raises:
        InputError: a block is neither text nor an image, or an image cannot be read.
    """
    images = [block.get("image") for block in blocks if block.get("type") == "image"]
    # Nothing is opened if a block is wrong.
    texts = [None if block.get("type") == "image" else _text(block) for block in blocks]
    seen = (Seen(to_data_url(found), picture) for found, picture in (process(images) if images else ()))
    return Content(tuple(next(seen) if text is None else text for text in texts))


def printable(text: str) -> str:
    """Text that a tokenizer can encode: half characters (lone surrogates) become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


NO_IMAGES = "this run shows no images to the model; give text"


def refusing(reason: str) -> Process:
    """A function `process` that raises an `InputError`."""

    def process(images: Sequence[Any]) -> Iterable[tuple[Image.Image, Picture]]:
        raise InputError(reason)

    return process


def unprocessed(images: Sequence[Any]) -> Iterable[tuple[Image.Image, Picture]]:
    """A function `process` for trials, before the model and its image processor are there: nothing is opened."""
    return [(Image.new("RGB", (1, 1)), stand_in()) for _ in images]


def stand_in(ids: Sequence[int] = ()) -> Picture:
    """A picture of one part, without pixels."""
    return Picture(torch.zeros(1, 1), torch.ones(3, dtype=torch.long), 1, whole_numbers(ids))


def _text(block: Mapping[str, Any]) -> str:
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return printable(block["text"])
    kind = block.get("type")
    raise InputError(f"a content block of type {kind!r:.40} is not supported; give text or images")
